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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from labkit.errors import LabError

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv")
NODES = ("n1", "n2")
START_LIMIT_S, STOP_LIMIT_S, POLL_S = 30.0, 10.0, 0.1
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# A job that is queued again waits for cred_expire before it starts.
SETTINGS = """
ClusterName=lab
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
KillWait=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=1,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=lab Nodes=n1,n2 Default=YES
"""


def can_start_slurm() -> bool:
    """Tell whether this process may start Slurm's daemons, and they are installed."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


class LocalSlurm:
    """A cluster on this machine; see ``start_local_slurm``.

    Attributes:
        settings: its slurm.conf, for the environment variable SLURM_CONF.
    """

    def __init__(self, folder: Path):
        self._folder, self.settings = folder, folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def ask(
        self,
        *words: object,
        folder: Path | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return what one of Slurm's own commands prints in a folder, with these variables."""
        done = subprocess.run(
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
        return done.stdout.strip() or done.stderr.strip()

    def submit(
        self, script: Path, *words: object, folder: Path, variables: Mapping[str, object]
    ) -> str:
        """Hand a script and its arguments to sbatch in a folder, and return the job's number.

        The job gets these variables, and a PATH on which this Python's torchrun comes first.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, **variables}
        number = self.ask("sbatch", "--parsable", script, *words, folder=folder, variables=own)
        if not number.isdigit():
            raise LabError(f"sbatch refuses: {number}")
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
            _wait_until(lambda: self.state(job) in OVER, limit_s)
        if (state := self.state(job)) not in OVER:
            self.ask("scancel", job)
        return state

    def start(self) -> None:
        """Start the daemons, and wait until both nodes take jobs."""
        for name in ("state", *(f"spool_{node}" for node in NODES)):
            (self._folder / name).mkdir()
        values = {"host": socket.gethostname(), "folder": self._folder, "ports": _free_ports(3)}
        self.settings.write_text(SETTINGS.format(**values))
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        places = [f"--{name}={self._folder}/munge.{name.split('-')[0]}" for name in names]
        self._start("munged", "--foreground", "--force", *places)
        _wait_until((self._folder / "munge.socket").exists, START_LIMIT_S)
        self._start("slurmctld", "-D", "-f", self.settings)
        _wait_until(lambda: "UP" in self.ask("scontrol", "ping"), START_LIMIT_S)
        for node in NODES:
            self._start("slurmd", "-D", "-f", self.settings, "-N", node)
        _wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], START_LIMIT_S)

    def stop(self) -> None:
        """Cancel all jobs, and end the daemons."""
        self.ask("scancel", "--partition=lab")
        with contextlib.suppress(LabError):
            _wait_until(lambda: not self.ask("squeue", "--noheader"), STOP_LIMIT_S)
        for each in reversed(self._daemons):
            each.terminate()
        for each in self._daemons:
            try:
                each.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                each.kill()

    def _start(self, *words: object) -> None:
        # They end with this process, even if it is killed.
        command = ["setpriv", "--pdeathsig", "KILL", *map(str, words)]
        with (self._folder / f"{words[0]}.out").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log))


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


def _wait_until(is_true: Callable[[], object], limit_s: float) -> None:
    give_up = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > give_up:
            raise LabError(f"Slurm did not answer within {limit_s:.0f} s")
        time.sleep(POLL_S)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
