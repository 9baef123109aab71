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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, cast

from labkit import config, requirements
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
MAX_PROGRAM_NAME_CHARACTERS = 100  # characters of a program's name; a file's name may have 255


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
    """Run a rank program on ``nproc`` ranks of this machine, or of each of several, and read what they measured.

    Args:
        program: a name in launch/, such as ``"all_reduce"``, or the path of a .py file.
        nproc: number of ranks; of ranks of each host where there are ``hosts``.
        device: "auto" takes GPUs where there is one for each rank, else the CPU; or "cpu", or "cuda".
        timeout_s: the run is stopped after this many seconds.
        warm: fork the ranks from a process that has imported torch already, on Linux. By default that is done in a
            kernel, as soon as that process is there, and not elsewhere; LABKIT_WARM=0 or 1 sets another default.
            ``result.info["warm"]`` says how it was.
        use: functions to take in place of the program's own of the same name, of those that it marks ``replaceable``.
            They travel with whatever they use of other cells.
        hosts: where to run instead of here: names that ssh reaches without a password by your own settings, or ``Host``
            objects. Each has this labkit and the others' torch. torchrun starts anew on each, and ranks are numbered
            in the order of the hosts; what they record and print comes here.
        **params: parameters of the program, checked against its Config before anything starts.

    Returns:
        The records and outputs of all ranks. Everything lies in ``result.folder``. ``result.ok`` is False where a check
        of the program found a difference.

    Raises:
        ParameterError: a bad argument; nothing was started.
        RankFailed: a rank failed; this is the first failure, not its echoes.
        RunTimedOut: the limit passed; holds every rank's stacks.
        NotAllHosts: the hosts did not find each other; no rank was started.
        HostLost: a host was lost, or cannot be reached.
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
    """Run a program's check, such as parity: does it compute what one device computes?

    A difference is a result: ``result.ok`` is False, and ``result.verdict_text`` says what differs.

    Args:
        program: as for ``run``.
        check: the value of the program's parameter ``check``.
        **arguments: the other arguments of ``run``.

    Raises:
        LabError: the program ended without a verdict. Otherwise as ``run``.
    """
    result = run(program, check=check, **arguments)
    if not result.verdict:
        fix = "let it end its check with here.finish_check(compared=..., ok=...)"
        raise LabError(f"{result.info['program']} with check={check!r} has given no verdict: {fix}")
    return result


def run_with_payload(program: Path, given: Mapping[str, Any], **arguments: Any) -> RunResult:
    """``run`` for a program of labkit's own that takes whatever it is given, see rank/given.py."""
    return execute_request(
        make_run_request(program, **arguments), payload_pickling.pack_payload(given)
    )


def sweep(
    program: str | Path, *, over: Mapping[str, Iterable[Any]], **fixed: Any
) -> list[RunResult]:
    """Run a program once for every combination of some arguments, in order.

    Args:
        program: as for ``run``.
        over: for some arguments of ``run`` (``nproc`` or a parameter), the values to take; the last one varies fastest.
        **fixed: the other arguments of ``run``.

    Raises:
        ParameterError: a bad argument of any of the runs; nothing was started.
    """
    chosen = argument_combinations(over, fixed)
    for one in chosen:  # all of them before the first run: a bad value must not cost an hour
        make_run_request(program, **(fixed | one))
    return [run(program, **(fixed | one)) for one in chosen]


def argument_combinations(
    over: Mapping[str, Iterable[Any]], fixed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every combination of the values of some arguments, in order; the last one varies fastest.

    Raises:
        ParameterError: an argument is fixed as well, or is given no list.
    """
    twice = sorted(set(over) & set(fixed))
    if twice:
        raise ParameterError(
            f"{', '.join(twice)}: given both in over= and as a fixed value; leave one out"
        )
    for name, each in over.items():
        if isinstance(each, str) or not isinstance(each, Iterable):
            raise ParameterError(
                f"over: {name} = {each!r} is no list of values to take: give [{each!r}], or leave it out"
            )
    values = [list(each) for each in over.values()]
    return [dict(zip(over, combination, strict=True)) for combination in itertools.product(*values)]


@dataclass
class RunRequest:
    """A checked request, in the words of run.json; ``target`` is what the worker is to run."""

    program: str
    program_path: str
    target: str
    params: dict[str, Any]
    arguments: list[str]
    nproc: int
    device: str
    timeout_s: float
    warm: bool | None
    use: dict[str, str]
    hosts: list[RunHost]

    @property
    def local_world_size(self) -> int:
        """Ranks on each."""
        return self.nproc // max(1, len(self.hosts))

    @property
    def title(self) -> str:
        """What progress calls the run."""
        return self.program

    @property
    def active_ranks(self) -> list[int]:
        """The ranks that are started."""
        return list(range(self.nproc))

    @property
    def worker_command(self) -> tuple[str, list[str]]:
        """What each of them is, and its command line."""
        return self.target, self.arguments

    @property
    def extra_environment(self) -> dict[str, str]:
        """What they find in their environment besides what every rank does."""
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
    """Check everything that can be checked before a start; the arguments are those of ``run``."""
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
        payload_pickling.validate_replacements(use, config.read_replaceable(path), path.stem)
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
    """The value as the wanted type of number. Raises ParameterError, with the rule, unless it is one above 0."""
    try:
        number = config.convert(value, wanted)
    except ValueError:
        number = 0
    if not number > 0:
        raise ParameterError(f"{name} = {value!r} is {rule}")
    return number


def execute_request(plan: RunRequest, given: bytes) -> RunResult:
    """Run what was checked when its turn has come; ``given`` goes to the ranks."""
    display = choose_display()

    def show_queue_position(before: int) -> None:
        runs = "1 run" if before == 1 else f"{before} runs"
        display.show_wait_reason(
            f"{plan.program}: waits for {runs} of this machine to end ({ENV_QUEUE}=0 does not wait)"
        )

    with resource_limits.explain_shortage():
        _refuse_unusable_machine(plan)
        here, device = (
            (0, "cpu") if plan.hosts else (len(plan.active_ranks), plan.device)
        )  # on hosts: other machines
        need = run_queue.ResourceNeeds.for_run(here, device)
        with run_queue.wait_for_turn(need, show_queue_position):
            return _execute_now(plan, given, display)


def _refuse_unusable_machine(plan: RunRequest) -> None:
    """Raise LabError for what would let a run fail late, or with words that do not name the cause."""
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
        with contextlib.suppress(LabError):  # what ended the run says more
            write_run_end(info, folder, started)
        raise
    else:
        write_run_end(info, folder, started)
    finally:
        progress.close(info["exit"])  # last: whoever reads what is shown may keep it waiting
    return load(folder.path)


def initial_run_info(plan: RunRequest) -> dict[str, Any]:
    """What run.json says before the start."""
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
    """Date and time, as run.json writes them."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def find_program(program: str | Path) -> tuple[Path, str]:
    """The file of a program, and what the worker is to run: a module of launch, or that file."""
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
) -> tuple[dict[str, Any], list[str]]:
    """All parameters of the program by name, and its command line."""
    config_class = config.read_config(path)
    if config_class is None:
        if params:
            raise ParameterError(
                f"{path.stem} has no class Config, so it takes no parameters: omit {', '.join(params)}"
            )
        return {}, []
    try:
        made = config.build_config(config_class, params, nproc)
    except ParameterError as error:
        raise ParameterError(f"{path.stem}: {error}") from None
    return asdict(made), config.to_argv(made)


def make_run_folder(info: dict[str, Any], given: bytes, name: str = "") -> RunFolder:
    """Make a run's folder, of this name or a new one, with its run.json. Raises LabError where that cannot be."""
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
    """A name for a folder of a run of this program that no other has."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{program[:MAX_PROGRAM_NAME_CHARACTERS]}-{secrets.token_hex(3)}"


def write_run_end(info: dict[str, Any], folder: RunFolder, started: float) -> None:
    """Complete run.json. Raises LabError where that cannot be written."""
    info = info | {"duration_s": round(time.monotonic() - started, 3)}
    with contextlib.suppress(RecordError):  # load tells it, with the name of the file
        info |= {
            "session": read_json(folder.session_json),
            "verdict": read_json(folder.verdict_json),
        }
    try:
        write_json(folder.run_json, info)
    except OSError as error:
        if not folder.path.is_dir():
            raise _folder_lost_error(folder) from error
        folder.remove_pids(info["nproc"])  # on a full disk, that makes room for the end of the run
        try:
            write_json(folder.run_json, info)
        except OSError:
            raise _folder_lost_error(folder) from error


def _folder_lost_error(folder: RunFolder) -> LabError:
    """The error of a run whose folder can no longer be written."""
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
    """Start the ranks and wait for their end; raise what went wrong, and leave no process behind."""
    with _launch_processes(_make_backend(plan, folder, parent), folder) as backend:
        # the first is known now, the second takes time that the ranks need to start
        info |= {"warm": backend.is_warm, "git_revision": git_revision()}
        status = _watch_backend(backend, folder, plan, progress)
    if not folder.path.is_dir():
        raise _folder_lost_error(folder)
    if status != 0:
        raise failure.first_failure(folder, status)


def _make_backend(plan: RunRequest, folder: RunFolder, parent: ForkServer | None) -> Backend:
    """Return what runs the ranks of this request; nothing is started yet."""
    if plan.hosts:
        request = {
            "target": plan.target,
            "arguments": plan.arguments,
            "nproc": plan.local_world_size,
            "device": plan.device,
        }
        return cast(Backend, load_cluster().MultiHostBackend(folder, plan.hosts, request))
    nproc = len(plan.active_ranks)
    environment = process.rank_environment(folder, nproc, plan.device) | plan.extra_environment
    return LocalBackend(folder, *plan.worker_command, nproc, environment, parent)


@contextlib.contextmanager
def _launch_processes(backend: Backend, folder: RunFolder) -> Iterator[Backend]:
    """Start the ranks; on leaving, every process of the run is gone.

    Raises:
        LabError: a process does not die.
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
    """Do this in a thread, which a second interrupt does not reach; here, where no thread may be started any more."""
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
    """Wait for the end of the ranks, show their progress, and return their exit status."""

    def has_failed() -> bool:
        progress.update()
        if not folder.path.is_dir():  # ranks could wait for torchrun's files in it until the limit
            raise _folder_lost_error(folder)
        return bool(failure.read_rank_errors(folder))

    def raise_timeout() -> NoReturn:
        stacks = backend.stacks(plan.active_ranks)
        logs = {rank: folder.log(rank) for rank in plan.active_ranks}
        outputs = {rank: failure.read_tail(log, lines=100_000) for rank, log in logs.items()}
        raise RunTimedOut(plan.timeout_s, stacks, outputs)

    return watch_ranks(backend.wait, has_failed, timeout_s=plan.timeout_s, on_timeout=raise_timeout)


def exit_label(error: BaseException) -> str:
    """What run.json calls the end of a run that this ended."""
    if isinstance(error, RunTimedOut):
        return "timed out"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def git_revision() -> str | None:
    """The commit of labkit's checkout, where it is one."""
    if not IN_CHECKOUT:  # another repository's, in whose environment labkit was installed
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
