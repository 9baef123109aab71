"""Starts, watches and stops the ranks of a program, and gives back what they measured."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit import config, failure, process
from labkit.errors import LabError, ParameterError, RunTimedOut
from labkit.folder import RunFolder, read_json, write_json
from labkit.progress import Progress
from labkit.result import RunResult, load

ROOT = Path(__file__).resolve().parents[1]
DEVICES = ("auto", "cpu", "cuda")
POLL_PERIOD_S = 0.1
FAILURE_GRACE_S = 3.0


def run(
    program: str | Path, *, nproc: int = 2, device: str = "auto", timeout_s: float = 300, **params: Any
) -> RunResult:
    """Run a rank program on ``nproc`` ranks of this machine and read what they measured.

    Args:
        program: a name in launch/, such as ``"convnext_spatial"``, or the path of a .py file.
        nproc: number of ranks.
        device: "auto" takes GPUs where there is one for each rank, else the CPU; or "cpu", or "cuda".
        timeout_s: the run is stopped after this many seconds.
        **params: parameters of the program, checked against its Config before anything starts.

    Returns:
        The records and outputs of all ranks. Everything lies in ``result.folder``.

    Raises:
        ParameterError: a bad argument; nothing was started.
        RankFailed: a rank failed; this is the first failure, not its echoes.
        RunTimedOut: the limit passed; holds every rank's stacks.
    """
    plan = _plan(program, nproc, device, timeout_s, params)
    folder = _new_folder(plan.name)
    write_json(folder.run_json, plan.info)
    started = time.monotonic()
    try:
        _run_ranks(plan, folder)
        plan.info["exit"] = "ok"
    except BaseException as error:
        plan.info |= {"exit": _outcome(error), "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        plan.info |= {"duration_s": round(time.monotonic() - started, 3), "session": read_json(folder.session_json)}
        write_json(folder.run_json, plan.info)
    return load(folder.path)


def sweep(program: str | Path, *, over: Mapping[str, Iterable[Any]], **fixed: Any) -> list[RunResult]:
    """Run a program once for every combination of some arguments, in order.

    Args:
        program: as for ``run``.
        over: for some arguments of ``run`` (``nproc`` or a parameter), the values to take; the last one varies fastest.
        **fixed: the other arguments of ``run``.
    """
    twice = sorted(set(over) & set(fixed))
    if twice:
        raise ParameterError(f"{', '.join(twice)}: given both in over= and as a fixed value; leave one out")
    values = [list(each) for each in over.values()]
    chosen = [dict(zip(over, combination, strict=True)) for combination in itertools.product(*values)]
    for one in chosen:  # all of them before the first run: a bad value must not cost an hour
        _plan(program, **_split(fixed | one))
    return [run(program, **(fixed | one)) for one in chosen]


@dataclass
class _Plan:
    """A checked request: what to start, and what run.json says about it."""

    name: str
    target: str
    arguments: list[str]
    nproc: int
    device: str
    timeout_s: float
    info: dict[str, Any] = field(default_factory=dict)


def _split(arguments: Mapping[str, Any]) -> dict[str, Any]:
    own = {"nproc": 2, "device": "auto", "timeout_s": 300.0}
    taken = {name: arguments.get(name, default) for name, default in own.items()}
    return taken | {"params": {name: value for name, value in arguments.items() if name not in own}}


def _plan(program: str | Path, nproc: int, device: str, timeout_s: float, params: Mapping[str, Any]) -> _Plan:
    """Check everything that can be checked before a start."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise ParameterError(f"nproc = {nproc!r} is not a number of ranks: give an int of at least 1")
    if device not in DEVICES:
        raise ParameterError(f"device = {device!r} is none of {', '.join(DEVICES)}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ParameterError(f"timeout_s = {timeout_s!r} is not a time limit: give a positive number of seconds")
    path, target = find_program(program)
    resolved, arguments = _resolve(path, params, nproc)
    plan = _Plan(path.stem, target, arguments, nproc, device, timeout_s)
    plan.info = {
        "program": path.stem,
        "program_path": str(path),
        "params": resolved,
        "arguments": arguments,
        "nproc": nproc,
        "device": device,
        "timeout_s": timeout_s,
        "python": platform.python_version(),
        "labkit": _version(),
        "git_revision": _git_revision(),
        "start": datetime.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "exit": "running",
    }
    return plan


def find_program(program: str | Path) -> tuple[Path, str]:
    """The file of a program, and what the worker is to run: a module of launch, or that file."""
    if str(program).endswith(".py"):
        path = Path(program).expanduser().resolve()
        if not path.is_file():
            raise ParameterError(f"there is no program {path}")
        return path, f"launch.{path.stem}" if path.parent == ROOT / "launch" else str(path)
    path = ROOT / "launch" / f"{program}.py"
    if not str(program).isidentifier() or not path.is_file():
        names = ", ".join(sorted(found.stem for found in (ROOT / "launch").glob("[!_]*.py")))
        raise ParameterError(f"no program is called {str(program)!r}. Give the path of a .py file or one of: {names}")
    return path, f"launch.{program}"


def _resolve(path: Path, params: Mapping[str, Any], nproc: int) -> tuple[dict[str, Any], list[str]]:
    """All parameters of the program by name, and its command line."""
    config_class = config.read_config(path)
    if config_class is None:
        if params:
            raise ParameterError(
                f"{path.stem} has no class Config, so it takes no parameters: omit {', '.join(params)}"
            )
        return {}, []
    try:
        made = config.make(config_class, params, nproc)
    except ParameterError as error:
        raise ParameterError(f"{path.stem}: {error}") from None
    return asdict(made), config.to_argv(made)


def _new_folder(name: str) -> RunFolder:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = runs_folder()
    path = parent / f"{stamp}-{name}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        fix = "set LABKIT_RUNS to a folder that can be written"
        raise LabError(f"cannot write to {parent} ({error.strerror}): {fix}") from error
    return RunFolder(path)


def runs_folder() -> Path:
    """Where runs are kept: $LABKIT_RUNS, else runs/ in the repository, else runs/ here."""
    chosen = os.environ.get("LABKIT_RUNS")
    if chosen:
        return Path(chosen).expanduser().resolve()
    return (ROOT if (ROOT / "launch").is_dir() else Path.cwd()) / "runs"


def _run_ranks(plan: _Plan, folder: RunFolder) -> None:
    """Start the ranks and wait for their end; raises what went wrong, and leaves no process behind."""
    progress = Progress(folder, plan.name, plan.nproc)
    outcome = "failed"
    try:
        with _processes(plan, folder) as running:
            try:
                status = _watch(running, folder, plan, progress)
            except KeyboardInterrupt:
                outcome = "interrupted"
                raise
        if status != 0:
            raise failure.first_failure(folder, status)
        outcome = "ok"
    except RunTimedOut:
        outcome = "timed out"
        raise
    finally:
        progress.close(outcome)


@contextlib.contextmanager
def _processes(plan: _Plan, folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """The run's torchrun; on leaving, every process of the run is gone."""
    running = None
    try:
        running = process.start(folder, plan.target, plan.arguments, plan.nproc, plan.device)
        yield running
    finally:
        # In a thread, which a second interrupt does not reach.
        stopping = threading.Thread(target=process.stop, args=[folder.path, running.pid if running else None])
        stopping.start()
        stopping.join()
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that even SIGKILL does not end
                running.wait(process.STOP_LIMIT_S)
        folder.remove_torchruns_files()


def _watch(running: subprocess.Popen[bytes], folder: RunFolder, plan: _Plan, progress: Progress) -> int:
    """Wait for torchrun's end and return its exit status."""
    limit = time.monotonic() + plan.timeout_s
    failed_at = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return running.wait(POLL_PERIOD_S)
        progress.update()
        now = time.monotonic()
        if now > limit:
            stacks = process.stacks_of(folder, plan.nproc)
            raise RunTimedOut(plan.timeout_s, stacks, _outputs(folder, plan.nproc))
        if not failed_at and failure.errors_of(folder):
            failed_at = now
        if failed_at and now - failed_at > FAILURE_GRACE_S:  # a rank that failed but cannot leave
            return 1


def _outputs(folder: RunFolder, nproc: int) -> dict[int, str]:
    return {rank: failure.tail(folder.log(rank), lines=100_000) for rank in range(nproc)}


def _outcome(error: BaseException) -> str:
    if isinstance(error, RunTimedOut):
        return "timed out"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _version() -> str:
    try:
        return metadata.version("labkit")
    except metadata.PackageNotFoundError:
        return "unknown"


def _git_revision() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
