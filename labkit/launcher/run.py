"""Start, watch and stop the ranks of a program, and return what they measured."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, cast

from labkit import config, program_source, requirements
from labkit.environment import ENV_NETWORK, ENV_QUEUE
from labkit.errors import LabError, ParameterError, RecordError, RunTimedOut
from labkit.launcher import (
    failure,
    network_namespace,
    payload_pickling,
    process,
    resource_limits,
    run_queue,
)
from labkit.launcher.backend import Backend, LocalBackend, RunHost, load_cluster, watch_ranks
from labkit.launcher.progress import Display, RunMonitor, choose_display
from labkit.launcher.warm_start import ForkServer, choose_warm_start, fork_server_manager
from labkit.runs import private_files
from labkit.runs.folder import (
    IN_CHECKOUT,
    ROOT,
    RunFolder,
    disk_problem,
    read_json,
    runs_folder,
    write_json,
)
from labkit.runs.records import FORMAT_VERSION
from labkit.runs.result import RunResult, load
from labkit.runs.verdict import finished_exit

DEVICES = ("auto", "cpu", "cuda")
RANKS_PER_CORE = 64
# a file name may have 255 characters
MAX_PROGRAM_NAME_CHARACTERS = 100


def run(
    program: str | Path,
    *,
    nproc: int = 2,
    device: str = "auto",
    timeout_s: float = 300,
    warm: bool | None = None,
    use: Mapping[str, Any] | None = None,
    hosts: Sequence[str | RunHost] | None = None,
    **params: Any,
) -> RunResult:
    """Run a rank program and return what its ranks measured.

    Args:
        program: name of a program in launch/, such as ``"all_reduce"``, or the path of a .py file.
        nproc: number of ranks; per host if ``hosts`` are given.
        device: "cpu", "cuda", or "auto": GPUs if there is one per rank, else the CPU.
        timeout_s: stop the run after this many seconds.
        warm: fork the ranks from a process that has already imported torch (Linux only). By default
            notebooks do so as soon as that process is ready; LABKIT_WARM=0 or 1 changes the
            default. ``result.info["warm"]`` says which way was taken.
        use: functions that replace those of the same name that the program marks ``replaceable``.
            They are sent together with everything they use from other cells.
        hosts: machines to run on instead of this one: ssh names that need no password, or ``Host``
            objects. Each needs this labkit and the same torch. Ranks are numbered in host order,
            and their records and output are copied here.
        **params: parameters of the program, checked against its Config before anything starts.

    Returns:
        Records and outputs of all ranks, also stored in ``result.folder``. ``result.ok`` is False
        if a check of the program found a difference.

    Raises:
        ParameterError: an argument is wrong; nothing was started.
        RankFailed: a rank failed; names the first failure, not the ones it caused.
        RunTimedOut: the limit passed; holds every rank's stacks.
        NotAllHosts: the hosts did not find each other; no rank was started.
        HostLost: a host was lost or cannot be reached.
        LabError: the run's folder cannot be written, or was deleted during the run.
    """
    plan = make_run_request(
        program,
        nproc=nproc,
        device=device,
        timeout_s=timeout_s,
        warm=warm,
        use=use,
        hosts=hosts,
        **params,
    )
    return execute_request(plan, b"" if use is None else payload_pickling.pack_payload(use))


def check(program: str | Path, *, check: str = "parity", **arguments: Any) -> RunResult:
    """Run a program's check, by default parity: does it compute what one device computes?

    A difference is a result: ``result.ok`` is False, and ``result.verdict_text`` says what differs.

    Args:
        program: as for ``run``.
        check: value of the program's parameter ``check``.
        **arguments: the other arguments of ``run``.

    Raises:
        LabError: the program ended without a verdict. Otherwise as ``run``.
    """
    result = run(program, check=check, **arguments)
    if not result.verdict:
        fix = "let it end its check with finish_check(compared=..., ok=...) of its session"
        raise LabError(f"{result.info['program']} with check={check!r} has given no verdict: {fix}")
    return result


def run_with_payload(program: Path, given: Mapping[str, Any], **arguments: Any) -> RunResult:
    """Run one of labkit's own programs with a payload of any Python values (session/payload.py)."""
    return execute_request(
        make_run_request(program, **arguments), payload_pickling.pack_payload(given)
    )


def sweep(
    program: str | Path, *, over: Mapping[str, Iterable[Any]], **fixed: Any
) -> list[RunResult]:
    """Run a program once for every combination of some arguments, in order.

    Args:
        program: as for ``run``.
        over: values by argument of ``run`` (``nproc`` or a parameter); the last varies fastest.
        **fixed: the other arguments of ``run``.

    Raises:
        ParameterError: an argument of any of the runs is wrong; nothing was started.
    """
    chosen = argument_combinations(over, fixed)
    # all of them before the first run: a bad value must not cost an hour
    for one in chosen:
        make_run_request(program, **(fixed | one))
    return [run(program, **(fixed | one)) for one in chosen]


def argument_combinations(
    over: Mapping[str, Iterable[Any]], fixed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return every combination of the values of some arguments; the last argument varies fastest.

    Raises:
        ParameterError: an argument is fixed as well, or its values are no list.
    """
    twice = sorted(set(over) & set(fixed))
    if twice:
        raise ParameterError(
            f"{', '.join(twice)}: given both in over= and as a fixed value; leave one out"
        )
    for name, each in over.items():
        if isinstance(each, str) or not isinstance(each, Iterable):
            raise ParameterError(
                f"over: {name} = {each!r} is no list of values to take: "
                f"give [{each!r}], or leave it out"
            )
    values = [list(each) for each in over.values()]
    return [dict(zip(over, combination, strict=True)) for combination in itertools.product(*values)]


@dataclass
class RunRequest:
    """A validated request; its fields are the keys of run.json, but for ``target`` (see
    find_program).
    """

    program: str
    program_path: str
    target: str
    params: dict[str, Any]
    given_params: dict[str, Any]
    nproc: int
    device: str
    timeout_s: float
    warm: bool | None
    use: dict[str, str]
    hosts: list[RunHost]

    @property
    def local_world_size(self) -> int:
        """Number of ranks on each host."""
        return self.nproc // max(1, len(self.hosts))

    @property
    def title(self) -> str:
        """Name of the run in the progress display."""
        return self.program

    @property
    def active_ranks(self) -> list[int]:
        """The ranks that are started; a simulation starts only some."""
        return list(range(self.nproc))

    @property
    def worker_command(self) -> tuple[str, list[str]]:
        """The program that the worker executes, and its arguments."""
        return self.target, []

    @property
    def extra_environment(self) -> dict[str, str]:
        """Environment variables that only this kind of run sets."""
        return {}


def make_run_request(
    program: str | Path,
    *,
    nproc: Any = 2,
    device: Any = "auto",
    timeout_s: Any = 300.0,
    warm: Any = None,
    use: Any = None,
    hosts: Any = None,
    **params: Any,
) -> RunRequest:
    """Validate the arguments of ``run`` without starting anything."""
    nproc = require_positive(
        "nproc", nproc, int, "not a number of ranks: give an int of at least 1"
    )
    timeout_s = require_positive(
        "timeout_s", timeout_s, float, "not a time limit: give a positive number of seconds"
    )
    cores = len(requirements.usable_cores())
    if nproc > RANKS_PER_CORE * cores:
        limit = (
            f"{RANKS_PER_CORE} for each of {cores} cores = {RANKS_PER_CORE * cores} is the limit"
        )
        raise ParameterError(f"nproc = {nproc} is too many processes for this machine: {limit}")
    if not isinstance(device, str) or device not in DEVICES:
        raise ParameterError(f"device = {device!r} is none of {', '.join(DEVICES)}")
    if not isinstance(warm, bool | None):
        raise ParameterError(f"warm = {warm!r} is none of True, False and None (labkit chooses)")
    places = load_cluster().parse_hosts(hosts) if hosts is not None else []
    if network_namespace.is_namespace_requested() and places:
        raise ParameterError(
            f"{ENV_NETWORK}=own keeps ranks to this machine, so none can run on hosts: unset it"
        )
    nproc *= max(1, len(places))
    path, target = find_program(program)
    if use is not None:
        payload_pickling.validate_replacements(
            use, program_source.read_replaceable(path), path.stem
        )
    sources = {
        name: payload_pickling.function_source(function) for name, function in (use or {}).items()
    }
    resolved = resolve_params(path, params, nproc)
    return RunRequest(
        path.stem,
        str(path),
        target,
        *resolved,
        nproc,
        device,
        timeout_s,
        choose_warm_start(warm),
        sources,
        places,
    )


def require_positive(name: str, value: Any, wanted: type, rule: str) -> Any:
    """Convert a value to the wanted type of number; raise ParameterError unless it is above 0."""
    try:
        number = config.convert(value, wanted)
    except ValueError:
        number = 0
    if not number > 0:
        raise ParameterError(f"{name} = {value!r} is {rule}")
    return number


def execute_request(plan: RunRequest, given: bytes) -> RunResult:
    """Run a validated request when it reaches the front of the queue; ranks receive ``given``."""
    display = choose_display()

    def show_queue_position(before: int) -> None:
        runs = "1 run" if before == 1 else f"{before} runs"
        display.show_wait_reason(
            f"{plan.program}: waits for {runs} of this machine to end ({ENV_QUEUE}=0 does not wait)"
        )

    with resource_limits.explain_shortage():
        _refuse_unusable_machine(plan)
        # Other machines do the work.
        if plan.hosts:
            need = run_queue.ResourceNeeds.for_run(0, "cpu")
        else:
            need = run_queue.ResourceNeeds.for_run(len(plan.active_ranks), plan.device)
        with run_queue.wait_for_turn(need, show_queue_position):
            return _execute_now(plan, given, display)


def _refuse_unusable_machine(plan: RunRequest) -> None:
    """Raise LabError for conditions that would otherwise make the run fail late and obscurely."""
    try:
        os.getcwd()
    except FileNotFoundError:
        what = "the current folder was deleted, and PyTorch cannot be loaded from there"
        raise LabError(f"{what}: go to another (cd, os.chdir), or restart the kernel") from None
    if not plan.hosts and (problem := requirements.loopback_problem()):
        raise LabError(
            f"{problem}, and ranks of one machine talk over it: {requirements.LOOPBACK_FIX}"
        )


def _execute_now(plan: RunRequest, given: bytes, display: Display) -> RunResult:
    info = initial_run_info(plan)
    folder = make_run_folder(info, given)
    progress = RunMonitor(folder, plan.title, plan.active_ranks, display)
    started = time.monotonic()
    try:
        with fork_server_manager.server_for_run(False if plan.hosts else plan.warm) as parent:
            started = progress.state.start_time_s = time.monotonic()
            _run_ranks(plan, folder, progress, parent, info)
        info["exit"] = finished_exit(folder)
    except BaseException as error:
        info |= {"exit": exit_label(error), "error": f"{type(error).__name__}: {error}"}
        # The error that ended the run says more.
        with contextlib.suppress(LabError):
            write_run_end(info, folder, started)
        raise
    else:
        write_run_end(info, folder, started)
    finally:
        # last: a reader of the display may keep it waiting
        progress.close(info["exit"])
    return load(folder.path)


def initial_run_info(plan: RunRequest) -> dict[str, Any]:
    """Return the contents of run.json before the start."""
    return {
        "version": FORMAT_VERSION,
        **asdict(plan),
        "hosts": [host.name for host in plan.hosts],
        "python": platform.python_version(),
        "labkit": next(
            (found.version for found in metadata.distributions(name="labkit")), "unknown"
        ),
        "start": timestamp_now(),
        "exit": "running",
    }


def timestamp_now() -> str:
    """Return the local time in the format of run.json."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def find_program(program: str | Path) -> tuple[Path, str]:
    """Return a program's file, and what the worker executes: a module name or that file's path."""
    if str(program).endswith(".py"):
        path = Path(os.path.expanduser(program)).resolve()
        if not path.is_file():
            raise ParameterError(f"there is no program {path}")
        ours = path.parent == ROOT / "launch" or path.is_relative_to(ROOT / "labkit")
        return path, ".".join(path.relative_to(ROOT).with_suffix("").parts) if ours else str(path)
    found = {path.stem: path for path in sorted((ROOT / "launch").glob("[!_]*.py"))}
    if str(program) not in found:
        names = ", ".join(found)
        raise ParameterError(
            f"no program is called {str(program)!r}. Give the path of a .py file or one of: {names}"
        )
    return found[str(program)], f"launch.{program}"


def resolve_params(
    path: Path, params: Mapping[str, Any], nproc: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all parameters of the program by name, and the subset that the caller gave."""
    config_class = config.read_config(path)
    if config_class is None:
        if params:
            raise ParameterError(
                f"{path.stem} has no class Config, so it takes no parameters: "
                f"omit {', '.join(params)}"
            )
        return {}, {}
    if params and not config_class.is_loaded:
        what = f"{path.stem} never reads its Config, so {', '.join(params)} would change nothing"
        raise ParameterError(
            f"{what}: call rank.run_main(main, Config), or rank.load_config(Config)"
        )
    try:
        every = config.config_params(config.build_config(config_class, params, nproc))
    except ParameterError as error:
        raise ParameterError(f"{path.stem}: {error}") from None
    return every, {name: every[name] for name in params}


def make_run_folder(info: dict[str, Any], given: bytes, name: str = "") -> RunFolder:
    """Create the folder of a run with its run.json; raise LabError if that is impossible."""
    parent = runs_folder()
    folder = RunFolder(parent / (name or make_run_name(info["program"])))
    try:
        private_files.make_private_folder(parent)
        if problem := disk_problem(parent):
            raise LabError(problem)
        folder.path.mkdir(mode=private_files.FOLDER_MODE)
        write_json(folder.run_json, info)
        if given:
            folder.write_payload(given)
    except OSError as error:
        fix = (
            resource_limits.shortage_fix(str(error))
            or "set LABKIT_RUNS to a folder that can be written"
        )
        raise LabError(f"cannot write to {parent} ({error.strerror}): {fix}") from error
    return folder


def make_run_name(program: str) -> str:
    """Return a unique folder name for a run of this program."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{program[:MAX_PROGRAM_NAME_CHARACTERS]}-{secrets.token_hex(3)}"


def write_run_end(info: dict[str, Any], folder: RunFolder, started: float) -> None:
    """Complete run.json; raise LabError if it cannot be written."""
    info = info | {"duration_s": round(time.monotonic() - started, 3)}
    # Loading the run reports this error, with the file's name.
    with contextlib.suppress(RecordError):
        info |= {
            "session": read_json(folder.session_json),
            "verdict": read_json(folder.verdict_json),
        }
    try:
        write_json(folder.run_json, info)
    except OSError as error:
        if not folder.path.is_dir():
            raise _folder_lost_error(folder) from error
        # On a full disk this makes room for the end of the record.
        folder.remove_pids(info["nproc"])
        try:
            write_json(folder.run_json, info)
        except OSError:
            raise _folder_lost_error(folder) from error


def _folder_lost_error(folder: RunFolder) -> LabError:
    if not folder.path.is_dir():
        what = f"the run's folder {folder.path} was deleted during the run, so its results are lost"
        return LabError(
            f"{what}: delete a run's folder only after its end, and not from its program"
        )
    return LabError(
        disk_problem(folder.path) or f"cannot write to {folder.path}: make it writable again"
    )


def _run_ranks(
    plan: RunRequest,
    folder: RunFolder,
    progress: RunMonitor,
    parent: ForkServer | None,
    info: dict[str, Any],
) -> None:
    """Start the ranks, wait for them and raise the first failure; leave no process behind."""
    with _launch_processes(_make_backend(plan, folder, parent), folder) as backend:
        # git is asked while the ranks start, so that it costs no time
        info |= {"warm": backend.is_warm, "git_revision": git_revision()}
        status = _watch_backend(backend, folder, plan, progress)
    if not folder.path.is_dir():
        raise _folder_lost_error(folder)
    if status != 0:
        raise failure.first_failure(folder, status)


def _make_backend(plan: RunRequest, folder: RunFolder, parent: ForkServer | None) -> Backend:
    if plan.hosts:
        request = {
            "target": plan.target,
            "params": plan.params,
            "nproc": plan.local_world_size,
            "device": plan.device,
        }
        return cast(Backend, load_cluster().MultiHostBackend(folder, plan.hosts, request))
    nproc = len(plan.active_ranks)
    environment = process.rank_environment(folder, nproc, plan.device) | plan.extra_environment
    return LocalBackend(folder, *plan.worker_command, nproc, environment, parent)


@contextlib.contextmanager
def _launch_processes(backend: Backend, folder: RunFolder) -> Iterator[Backend]:
    """Start the ranks; on exit, kill every process of the run.

    Raises:
        LabError: a process cannot be killed.
    """
    immortal: list[int] = []
    try:
        backend.start()
        yield backend
    finally:
        _run_uninterrupted(lambda: immortal.extend(backend.stop()))
        folder.remove_torchrun_files()
    if immortal:
        what = f"processes {immortal} of {folder.path} did not die of SIGKILL"
        raise LabError(f"{what}: they wait for a device; restart the machine")


def _run_uninterrupted(work: Callable[[], None]) -> None:
    """Call ``work`` in a thread, out of reach of a second KeyboardInterrupt."""
    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:
        work()
    else:
        thread.join()


def _watch_backend(
    backend: Backend, folder: RunFolder, plan: RunRequest, progress: RunMonitor
) -> int:
    """Wait for the ranks while showing progress; return torchrun's exit status."""

    def has_failed() -> bool:
        progress.update()
        # Without the folder, ranks would wait for torchrun's files until the time limit.
        if not folder.path.is_dir():
            raise _folder_lost_error(folder)
        return bool(failure.read_rank_errors(folder))

    def raise_timeout() -> NoReturn:
        stacks = backend.stacks(plan.active_ranks)
        logs = {rank: folder.log(rank) for rank in plan.active_ranks}
        outputs = {rank: failure.read_tail(log, lines=100_000) for rank, log in logs.items()}
        raise RunTimedOut(plan.timeout_s, stacks, outputs)

    return watch_ranks(backend.wait, has_failed, timeout_s=plan.timeout_s, on_timeout=raise_timeout)


def exit_label(error: BaseException) -> str:
    """Return the value of "exit" in run.json for a run that ended with this error."""
    if isinstance(error, RunTimedOut):
        return "timed out"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def git_revision() -> str | None:
    """Return the commit of labkit's checkout, or None if it is not one."""
    # The current folder is another repository, in whose environment labkit is installed.
    if not IN_CHECKOUT:
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
