"""Start a small Slurm on this machine, to try a job's script: a controller and two nodes.

    with start_local_slurm() as slurm:
        job = slurm.submit(script, "train.py", folder=folder, variables={})
        slurm.signal_script(job)  # as Slurm does before it ends a job
        print(slurm.wait(job))

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. All daemons end with
the block, and with this process.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from labkit.errors import LabError

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv")
START_LIMIT_S, STOP_LIMIT_S, POLL_S = 30.0, 10.0, 0.1
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# A job that is queued again waits for cred_expire before it starts.
SETTINGS = """
ClusterName=labkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
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
KillWait=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=1,bf_interval=1
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


def can_start_slurm() -> bool:
    """Tell whether this process may start Slurm's daemons, and they are installed."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


class LocalSlurm:
    """A cluster on this machine; see ``start_local_slurm``.

    Attributes:
        folder: what the daemons keep.
        settings: its slurm.conf, for the environment variable SLURM_CONF.
        nodes: names of the nodes.
        cpus: of each node.
        partitions: lines of slurm.conf.
    """

    nodes: tuple[str, ...] = ("n1", "n2")
    cpus = 8
    partitions = "PartitionName=lab Nodes=n1,n2 Default=YES\n"

    def __init__(self, folder: Path):
        self.folder, self.settings = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def ask(
        self,
        *words: object,
        folder: Path | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return what one of Slurm's own commands prints in a folder, with these variables."""
        return self._run(words, folder, variables).stdout.strip()

    def _run(
        self,
        words: Sequence[object],
        folder: Path | None,
        variables: Mapping[str, object] | None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            cwd=folder,
            env=os.environ
            | {name: str(value) for name, value in (variables or {}).items()}
            | {"SLURM_CONF": str(self.settings)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def submit(
        self, script: Path, *words: object, folder: Path, variables: Mapping[str, object]
    ) -> str:
        """Hand a script and its arguments to sbatch in a folder, and return the job's number.

        The job gets these variables, and a PATH on which this Python's torchrun comes first.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, **variables}
        done = self._run(("sbatch", "--parsable", script, *words), folder, own)
        if not (number := done.stdout.strip()).isdigit():
            raise LabError(f"sbatch refuses: {done.stderr.strip()}")
        return number

    def signal_script(self, job: str) -> None:
        """Send USR1 to a job's script, as ``--signal=B:USR1@…`` makes Slurm do before the end."""
        self.ask("scancel", "--batch", "--signal=USR1", job)

    def state(self, job: str) -> str:
        """Return a job's state, such as "RUNNING"."""
        shown = self.ask("scontrol", "show", "job", job, "--oneliner").split()
        return next((each[9:] for each in shown if each.startswith("JobState=")), "")

    def wait(self, job: str, limit_s: float = 120) -> str:
        """Return a job's last state; cancel it after the limit."""
        with contextlib.suppress(LabError):
            wait_until(lambda: self.state(job) in OVER, limit_s)
        if (state := self.state(job)) not in OVER:
            self.ask("scancel", job)
        return state

    def start(self) -> None:
        """Start the daemons, and wait until all nodes take jobs."""
        names = self.all_nodes()
        for name in ("state", *(f"spool_{node}" for node in names)):
            (self.folder / name).mkdir()
        port, *ports = _free_ports(1 + len(names))
        host = socket.gethostname()
        lines = [
            NODE.format(node=node, host=host, port=each, cpus=self.cpus)
            for node, each in zip(names, ports, strict=True)
        ]
        text = SETTINGS.format(host=host, folder=self.folder, port=port)
        self.settings.write_text(text + "".join(lines) + self.partitions)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        options = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        places = [f"--{each}={self.folder}/munge.{each.removesuffix('-file')}" for each in options]
        self._start("munged", "munged", "--foreground", "--force", *places)
        wait_until((self.folder / "munge.socket").exists, START_LIMIT_S)
        self._start("slurmctld", "slurmctld", "-D", "-f", self.settings)
        # A command that comes earlier tries again after half a minute.
        wait_until(lambda: _listens(port), START_LIMIT_S)
        for node in names:
            self.start_node(node)
        wait_until(lambda: all(map(self.is_up, self.nodes)), START_LIMIT_S)

    def all_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes, and of any that need not take jobs."""
        return self.nodes

    def start_node(self, node: str, *through: object) -> None:
        """Start a node's daemon, through another command if there is one."""
        self._start(node, *through, "slurmd", "-D", "-f", self.settings, "-N", node)

    def is_up(self, node: str) -> bool:
        """Tell whether a node takes jobs."""
        return self.node_state(node).startswith("idle")

    def node_state(self, node: str) -> str:
        """Return what sinfo says of a node; "*" at the end: it was heard of earlier."""
        return self.ask("sinfo", "--noheader", f"--nodes={node}", "--format=%T")

    def stop(self) -> None:
        """Cancel all jobs, and end the daemons."""
        self.ask("scancel", "--user=root")
        with contextlib.suppress(LabError):
            wait_until(lambda: not self.ask("squeue", "--noheader"), STOP_LIMIT_S)
        for each in reversed(self._daemons.values()):
            each.terminate()
        for each in self._daemons.values():
            try:
                each.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                each.kill()

    def _start(self, name: str, *words: object) -> None:
        # They end with this process, even if it is killed.
        command = ["setpriv", "--pdeathsig", "KILL", *map(str, words)]
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=log)


@contextlib.contextmanager
def start_local_slurm() -> Iterator[LocalSlurm]:
    """Start a controller and two nodes; they end with the block.

    Raises:
        LabError: they cannot be started here, or do not answer.
    """
    if not can_start_slurm():
        raise LabError(f"Slurm's daemons need root, and {', '.join(PROGRAMS)}")
    # A short path, because munged's socket lies in it.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm = LocalSlurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(is_true: Callable[[], object], limit_s: float) -> None:
    """Wait until a function is true; raise LabError after the limit."""
    give_up = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > give_up:
            raise LabError(f"Slurm did not answer within {limit_s:.0f} s")
        time.sleep(POLL_S)


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
