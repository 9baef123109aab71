"""Lab 8's job script: a broken copy to mend, and a rehearsal with stand-ins for Slurm's commands.

The rehearsal runs the script by bash, as Slurm would on the first of two nodes. ``srun`` starts its
command once for each node, ``torchrun`` waits for a save to be asked for, and USR1 goes where the
script's ``--signal`` says.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError
from labkit.runs.folder import ROOT
from labkit_cluster.local_slurm import OVER, LocalSlurm, can_start_slurm, start_local_slurm
from labkit_course.launches import recorded_words

GENERAL = ROOT / "launch" / "cluster" / "general.sbatch"
JOB = "4711"
ADDRESS = "10.0.0.1"
# After the signal, ranks have this long to save; Slurm then ends the job.
START_LIMIT_S, SAVE_LIMIT_S, POLL_S = 5.0, 2.0, 0.02

BREAKS = {
    "--signal=B:USR1@120": "--signal=USR1@120",
    ' torchrun "$@" &\n'
    "wait $! # ends early when the signal comes,\n"
    "wait $! # and then the ranks save\n": ' torchrun "$@"\n',
    "is_host=$((SLURM_NODEID == 0))": "is_host=$SLURM_NODEID",
}
"""What is right in the general script, and what the broken one has in its place."""

STAND_INS = {
    "scontrol": """
case "$1" in show) printf "n1\\nn2\\n";; *) echo "$*" >> "$REHEARSAL/scontrol.told";; esac""",
    "hostname": f"""
case "$1" in -i) echo 127.0.1.1;; -I) echo "{ADDRESS} ";; *) echo "n$SLURM_NODEID";; esac""",
    "srun": """
nodes="0 1"
while [ "${1#-}" != "$1" ]; do [ "$1" = --ntasks=1 ] && nodes=0; shift; done
for node in $nodes; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & started="$started $!"; done
status=0
for each in $started; do wait "$each" || status=$?; done
exit "$status"
""",
    "torchrun": """
echo "$SLURM_NODEID $$ $*" >> "$REHEARSAL/torchrun.told"
while [ ! -e "$SAVES/stop" ]; do sleep 0.05; done
echo "$SLURM_NODEID" >> "$REHEARSAL/saved"
""",
}


@dataclass(frozen=True)
class Rehearsal:
    """What happened: torchrun's arguments on each node, who saved, and what the script did."""

    arguments: dict[str, str]
    to_script: bool
    saved: list[str]
    requeued: bool
    status: int | None
    errors: str


def broken_script() -> str:
    """Return the general script without its comments, with three faults."""
    script = GENERAL.read_text(encoding="utf-8")
    for right, wrong in BREAKS.items():
        assert script.count(right) == 1, f"{right!r} is to stand in {GENERAL} once"
        script = script.replace(right, wrong)
    lines = script.splitlines()
    kept = [line for line in lines if not re.match("#( |$)", line)]
    return re.sub("\n{2,}", "\n\n", "\n".join(kept)) + "\n"


def rehearse(script: str) -> Rehearsal:
    """Run a script with stand-ins for Slurm's commands, and send USR1 when torchrun runs."""
    to_script = bool(re.search(r"^#SBATCH.*--signal[= ]B:(SIG)?USR1@", script, re.MULTILINE))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, body in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash{body}\n")
            (folder / name).chmod(0o700)
        (folder / "script").write_text(script)
        plain = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        slurm = {"JOB_ID": JOB, "JOB_NODELIST": "n[1-2]", "NNODES": "2", "CPUS_PER_TASK": "2"}
        slurm |= {"NODEID": "0", "JOB_NUM_NODES": "2", "PROCID": "0"}
        environment = plain | {f"SLURM_{name}": value for name, value in slurm.items()}
        environment |= {"REHEARSAL": place, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
        with (folder / "errors").open("wb") as errors:
            job = subprocess.Popen(
                ["bash", "script", "train.py"],
                cwd=folder,
                env=environment,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        try:
            _wait(job, START_LIMIT_S, lambda: len(_lines(folder / "torchrun.told")) > 1)
            told = [line.split(" ", 2) for line in _lines(folder / "torchrun.told")]
            for pid in [job.pid] if to_script else [int(pid) for _, pid, _ in told]:
                if job.poll() is None:
                    os.kill(pid, signal.SIGUSR1)
            _wait(job, SAVE_LIMIT_S, lambda: False)
        finally:
            status = job.poll()
            _kill_session(job)
        return Rehearsal(
            {node: arguments for node, _, arguments in told},
            to_script,
            sorted(_lines(folder / "saved")),
            f"requeue {JOB}" in _lines(folder / "scontrol.told"),
            status,
            (folder / "errors").read_text(errors="replace").strip(),
        )


def problem_of(seen: Rehearsal) -> tuple[str, str]:
    """Return what went wrong in a rehearsal, and a hint; empty if nothing did."""
    if len(seen.arguments) < 2:
        said = f": {seen.errors[-200:]}" if seen.errors else ""
        return f"torchrun did not start on two nodes{said}", "Is the rest of the script as it was?"
    hosts = [node for node, each in seen.arguments.items() if re.search("is_host=(1|true)", each)]
    if len(hosts) != 1:
        found = "both nodes take" if hosts else "no node takes"
        return (
            f"{found} the endpoint for their own" if hosts else f"{found} the endpoint for its own",
            "Slurm tells each node its number as SLURM_NODEID, and the endpoint is node 0's.",
        )
    if hosts != ["0"]:
        return (
            "node 1 takes the endpoint for its own, and the address is node 0's",
            "SLURM_NODEID is 0 on node 0, where is_host has to be 1.",
        )
    if f"{ADDRESS}:" not in seen.arguments["0"]:
        return "the endpoint is not node 0's address", "Leave the endpoint as it was."
    if not seen.to_script:
        return (
            "Slurm sent USR1 to the tasks and not to the script, so torchrun ended without a save",
            "man sbatch, --signal: which letter makes it signal the batch shell alone?",
        )
    if seen.saved != ["0", "1"] and seen.status is not None:
        return (
            "the signal came, and the script ended before the ranks had saved",
            "The signal ends a wait early, with a status above 128. Wait once more.",
        )
    if seen.saved != ["0", "1"]:
        return (
            "the signal came, but nobody was asked to save until the time was up",
            "bash runs a trap when the command in the foreground has ended. Start srun with & and"
            " wait for it.",
        )
    if not seen.requeued:
        return (
            f"the ranks saved, but the job was not queued again (status {seen.status})",
            "scontrol requeue does that, if the status is that of the second wait.",
        )
    return "", ""


def run_job(script: str, folder: Path, train: Path, steps: int) -> str:
    """Run train.py as a job that saves every 4 steps under a Slurm on this machine; return its log.

    Once the first save is there, preempt it.

    Where Slurm's daemons cannot be started, return the log of such a job that was recorded.
    """
    if not can_start_slurm():
        print("(recorded: Slurm's daemons need root, and its packages)")
        return recorded_words()["job"]["log"]
    (folder / "job.sbatch").write_text(script)
    saves = Path(tempfile.mkdtemp(dir=folder))
    variables = {"STEPS": steps, "EVERY": 4, "STEP_S": 0.4, "RANKS": 1, "OMP_NUM_THREADS": 1}
    with start_local_slurm() as slurm:
        job = slurm.submit(
            folder / "job.sbatch", train, folder=folder, variables=variables | {"SAVES": saves}
        )
        preempt(slurm, job, saves / "step_00000004" / ".metadata")
        state = slurm.wait(job)
    log = folder / f"job.sbatch-{job}.out"
    text = log.read_text()
    log.unlink()  # the next Slurm counts from the same number, and appends
    complete = sorted(path.parent.name for path in saves.glob("step_*/.metadata"))
    steps_text = ", ".join(str(int(name.split("_")[1])) for name in complete)
    return f"{text}(saves of {steps_text} steps)\n(Slurm: {state})\n"


def preempt(slurm: LocalSlurm, job: str, when: Path, limit_s: float = 60) -> None:
    """Signal a job's script as Slurm would, once this file is there."""
    give_up = time.monotonic() + limit_s
    while not when.exists() and slurm.state(job) not in OVER:
        if time.monotonic() > give_up:
            raise LabError(f"{when} was not written within {limit_s:.0f} s")
        time.sleep(POLL_S)
    slurm.signal_script(job)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _wait(job: subprocess.Popen[bytes], limit_s: float, is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + limit_s
    while job.poll() is None and not is_true() and time.monotonic() < give_up:
        time.sleep(POLL_S)


def _kill_session(job: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
