"""Slurm for real on one machine: a controller and two pairs of nodes, each with a daemon of its own."""

import contextlib
import os
import socket
import subprocess
from functools import partial
from pathlib import Path

import psutil
from fixture_processes import is_alive, wait_for

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
NODES = ("n1", "n2", "n3", "n4", "n6")
BLIND = "n5"
"""A node that does not see one folder. Only where mounts may be made."""

STOP_TIMEOUT_S = 30

# A node that is silent for five seconds is dead; a job that is queued again waits for cred_expire before it starts.
SETTINGS = """
ClusterName=labkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldParameters=enable_configless
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=1,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=32
NodeName=n4 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[4]} CPUs=32
PartitionName=good Nodes=n1,n2 Default=YES
NodeName=n5 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[5]} CPUs=32
NodeName=n6 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[6]} CPUs=32
PartitionName=mortal Nodes=n3,n4,n6
PartitionName=blind Nodes=n1,n5
"""


class Slurm:
    """A cluster on this machine, for as long as the tests need it."""

    def __init__(self, folder: Path, unseen: Path):
        self.folder, self.unseen, self.settings = folder, unseen, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("state", *(f"spool_{node}" for node in (*NODES, BLIND))):
            (self.folder / name).mkdir()
        ports = _free_ports(7)
        self.settings.write_text(SETTINGS.format(host=socket.gethostname(), folder=self.folder, ports=ports))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        places = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in names]
        self._start("munged", "munged", "--foreground", "--force", *places)
        wait_for((self.folder / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D", "-f", self.settings)
        wait_for(lambda: _listens(ports[0]))  # a command that comes earlier tries again after half a minute
        for node in NODES:
            self.start_node(node)
        hide = 'mount -t tmpfs none "$0" && exec "$@"'
        self.start_node(BLIND, "unshare", "--mount", "sh", "-c", hide, self.unseen)
        wait_for(lambda: all(map(self.is_up, NODES)), limit_s=30)

    def start_node(self, node: str, *through: object) -> None:
        self._start(node, *through, "slurmd", "-D", "-f", self.settings, "-N", node)

    def is_up(self, node: str) -> bool:
        """Whether a node takes jobs."""
        return self._state_of(node).startswith("idle")

    def mend(self) -> None:
        """Start those nodes again whose daemon has ended or no longer answers, as it rarely does by itself."""
        for node in NODES:
            there = partial(self._is_there, node)
            if self._daemons[node].poll() is None:
                with contextlib.suppress(AssertionError):  # a busy one answers again
                    wait_for(there, limit_s=30)
                    continue
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill_node(node)
            self.start_node(node)
            self.ask("scontrol", "update", f"nodename={node}", "state=resume")
            wait_for(there, limit_s=30)

    def tell(self) -> str:
        """What the report of a failed test should hold: the nodes, the jobs, and the ends of all logs."""
        said = []
        for words in (("sinfo", "-N", "-o", "%N %T %E"), ("squeue",)):
            with contextlib.suppress(subprocess.TimeoutExpired):  # a controller that is gone does not answer
                said.append(self.ask(*words))
        logs = [f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.log"))]
        return "\n".join(said + logs)

    def kill_node(self, node: str) -> None:
        """As if its plug was pulled: the daemon and all that it has started end at once."""
        daemon = psutil.Process(self._daemons[node].pid)
        family = [daemon, *_steps_of(self.folder / f"{node}.log"), *daemon.children(recursive=True)]
        family += [child for each in family for child in each.children(recursive=True)]
        for each in family:
            each.suspend()
        for each in family:
            each.kill()
        self._daemons.pop(node).wait()

    def ask(self, *words: object) -> str:
        """What one of Slurm's own commands says."""
        environment = os.environ | {"SLURM_CONF": str(self.settings)}
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=30, env=environment)
        return done.stdout.strip()

    def stop(self) -> list[int]:
        """End all daemons once no job is left, for which it waits a little; returns what outlives them."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.ask("squeue", "--noheader"), limit_s=STOP_TIMEOUT_S)
        started = [each for node in (*NODES, BLIND) for each in _steps_of(self.folder / f"{node}.log")]
        started += [psutil.Process(each.pid) for each in self._daemons.values() if each.poll() is None]
        started += [child for each in started for child in each.children(recursive=True)]
        for each in reversed(self._daemons.values()):
            each.terminate()
        for each in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(STOP_TIMEOUT_S)
        psutil.wait_procs(started, STOP_TIMEOUT_S)
        left = [each for each in started if is_alive(each.pid)]
        for each in left:
            each.kill()
        return [each.pid for each in left]

    def _state_of(self, node: str) -> str:
        return self.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")

    def _is_there(self, node: str) -> bool:
        """Whether a node answers, with or without jobs; a state that ends in * is one that was heard of earlier."""
        state = self._state_of(node)
        return not state.startswith(("down", "drain")) and not state.endswith("*")

    def _start(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log)


def _steps_of(log: Path) -> list[psutil.Process]:
    """What runs the steps of jobs on a node, which no longer descends from its daemon: whoever writes its log."""
    steps = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "slurmstepd"]
    return [each for each in steps if any(file.path == str(log) for file in each.open_files())]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
