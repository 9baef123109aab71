"""The package's Slurm on this machine, with more nodes, and one that does not see a folder."""

import contextlib
import subprocess
from functools import partial
from pathlib import Path

import psutil
from fixture_processes import is_alive, wait_for

from labkit_cluster.local_slurm import LocalSlurm

NODES = ("n1", "n2", "n3", "n4", "n6")
BLIND = "n5"
"""A node that does not see one folder. Only where mounts may be made."""

STOP_TIMEOUT_S = 30


class Slurm(LocalSlurm):
    """A cluster on this machine, for as long as the tests need it."""

    nodes = NODES
    cpus = 32
    # A node that is silent for five seconds is dead.
    partitions = """SlurmdTimeout=5
PartitionName=good Nodes=n1,n2 Default=YES
PartitionName=mortal Nodes=n3,n4,n6
PartitionName=blind Nodes=n1,n5
"""

    def __init__(self, folder: Path, unseen: Path):
        super().__init__(folder)
        self.unseen = unseen

    def all_nodes(self) -> tuple[str, ...]:
        return (*NODES, BLIND)

    def start_node(self, node: str, *through: object) -> None:
        hide = 'mount -t tmpfs none "$0" && exec "$@"'
        super().start_node(node, *(("unshare", "--mount", "sh", "-c", hide, self.unseen) if node == BLIND else through))

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

    def end(self) -> list[int]:
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

    def _is_there(self, node: str) -> bool:
        """Whether a node answers, with or without jobs; a state that ends in * is one that was heard of earlier."""
        state = self.node_state(node)
        return not state.startswith(("down", "drain")) and not state.endswith("*")


def _steps_of(log: Path) -> list[psutil.Process]:
    """What runs the steps of jobs on a node, which no longer descends from its daemon: whoever writes its log."""
    steps = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "slurmstepd"]
    return [each for each in steps if any(file.path == str(log) for file in each.open_files())]
