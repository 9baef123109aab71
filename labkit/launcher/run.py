"""Start, watch and stop the ranks of a program, and return what they measured."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, cast

from labkit import config, program_source, requirements
from labkit.environment import ENV_DEVICE, ENV_NETWORK, ENV_QUEUE, ENV_SHARE_GPUS, read_choice
from labkit.errors import LabError, ParameterError, RecordError, RunTimedOut
from labkit.launcher import failure, network_namespace, payload_pickling, process, resource_limits
from labkit.launcher.backend import (
    Backend,
    LocalBackend,
    RunHost,
    find_recorded,
    load_cluster,
    load_simulator,
)
from labkit.launcher.progress import Display, RunMonitor, choose_display
from labkit.launcher.run_queue import ResourceNeeds, wait_for_turn
from labkit.launcher.warm_start import ForkServer, choose_warm_start, fork_server_manager
from labkit.launcher.watch import watch_ranks
from labkit.runs import folder as folders
from labkit.runs import private_files
from labkit.runs.folder import ROOT, RunFolder, read_json, write_json
from labkit.runs.records import FORMAT_VERSION
from labkit.runs.result import RunResult, load
from labkit.runs.verdict import finished_exit
from labkit.theory.emulated import Emulated

DEVICES = ("auto", "cpu", "cuda")
RANKS_PER_CORE = 64
# A file name may have 255 characters.
MAX_PROGRAM_NAME_CHARACTERS = 100
MAX_SHOWN_CHARACTERS = 300


def run(
    program: str | Path,
    *,
    nproc: int = 2,
    device: str | None = None,
    timeout_s: float = 300,
    warm: bool | None = None,
    use: Mapping[str, Any] | None = None,
    hosts: Sequence[str | RunHost] | None = None,
    emulate: Emulated | str | None = None,
    **params: Any,
) -> RunResult:
    """Run a rank program and return what its ranks measured.

    Args:
        program: name of a program in launch/, such as ``"all_reduce"``, or the path of a .py file.
        nproc: number of ranks; per host if ``hosts`` are given.
        device: "cpu", "cuda", or "auto": GPUs if there is one per rank, else the CPU. By default
            what LABKIT_DEVICE says, or "auto".
        timeout_s: stop the run after this many seconds.
        warm: fork the ranks from a process that has already imported torch (Linux only). By default
            notebooks do so as soon as that process is ready; LABKIT_WARM=0 or 1 changes the
            default. ``result.info["warm"]`` says which way was taken.
        use: functions that replace those of the same name that the program marks ``replaceable``.
            They are sent together with everything they use from other cells.
        hosts: machines to run on instead of this one: ssh names that need no password, or ``Host``
            objects. Each needs this labkit and the same torch. Ranks are numbered in host order,
            and their records and output are copied here.
        emulate: hardware whose links and devices the ranks wait for, see ``Emulated``; or the name
            of one, such as "h100-8x", for blocks of Llama 2 in slow motion.
        **params: parameters of the program, checked against its Config before anything starts.

    Returns:
        Records and outputs of all ranks, also stored in ``result.folder``. ``result.ok`` is False
        if a check of the program found a difference. With LABKIT_RECORDED=1 it is one that was
        recorded on another machine, and says so, where the labs have a run of these arguments.

    Raises:
        ParameterError: an argument is wrong; nothing was started.
        RankFailed: a rank failed; names the first failure, not the ones it caused.
        RunTimedOut: the limit passed; holds every rank's stacks.
        NotAllHosts: the hosts did not find each other; no rank was started.
        HostLost: a host was lost or cannot be reached.
        LabError: the run's folder cannot be written, or was deleted during the run.
    """
    where = {"nproc": nproc, "device": device, "hosts": hosts, "emulate": emulate}
    request = make_run_request(program, **where, timeout_s=timeout_s, warm=warm, use=use, **params)
    recorded: RunResult | None = find_recorded(request)
    if recorded is not None:
        return recorded
    return execute_request(request, b"" if use is None else payload_pickling.pack_payload(use))


def use_one_device(ranks: int) -> str:
    """Let all runs of this process compute on GPUs if there is one for each of so many ranks, and
    on the CPU otherwise, so that they can be compared; return "cuda" or "cpu".

    LABKIT_DEVICE, where it is set, decides instead.
    """
    if not os.environ.get(ENV_DEVICE):
        gpus, _ = requirements.usable_gpus()
        shared = gpus and os.environ.get(ENV_SHARE_GPUS) == "1"
        os.environ[ENV_DEVICE] = "cuda" if shared or gpus >= ranks else "cpu"
    return os.environ[ENV_DEVICE]


def check(program: str | Path, *, check: str = "parity", **arguments: Any) -> RunResult:
    """Run a program's check, by default parity: does it compute what one device computes?

    A difference is a result: ``result.ok`` is False, and ``result.verdict_text`` says what differs.
    Errors are those of ``run``, and a LabError where the program ends without a verdict.

    Args:
        program: as for ``run``.
        check: value of the program's parameter ``check``.
        **arguments: the other arguments of ``run``.
    """
    result = run(program, check=check, **arguments)
    if not result.verdict:
        fix = "let it end its check with finish_check(compared=..., ok=...) of its session"
        raise LabError(f"{result.info['program']} with check={check!r} has given no verdict: {fix}")
    return result


def run_with_payload(program: Path, given: Mapping[str, Any], **arguments: Any) -> RunResult:
    """Run one of labkit's own programs with a payload of any Python values (session/payload.py)."""
    request = make_run_request(program, **arguments)
    return execute_request(request, payload_pickling.pack_payload(given))


def argument_combinations(
    over: Mapping[str, Iterable[Any]], fixed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return every combination of these arguments' values; the last argument varies fastest."""
    if twice := ", ".join(sorted(set(over) & set(fixed))):
        raise ParameterError(f"{twice}: given both in over= and as a fixed value; leave one out")
    for name, each in over.items():
        if isinstance(each, str) or not isinstance(each, Iterable):
            fix = f"give [{each!r}], or leave it out"
            raise ParameterError(f"over: {name} = {each!r} is no list of values to take: {fix}")
    values = [list(each) for each in over.values()]
    return [dict(zip(over, combination, strict=True)) for combination in itertools.product(*values)]


@dataclass
class RunRequest:
    """A validated request; its fields, except ``target`` (see find_program), go into run.json."""

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
    emulate: Emulated | None

    @property
    def local_world_size(self) -> int:
        return self.nproc // max(1, len(self.hosts))

    # A simulation overrides these: it starts only some ranks, by a program of its own.

    @property
    def title(self) -> str:
        return self.program

    @property
    def active_ranks(self) -> list[int]:
        return list(range(self.nproc))

    @property
    def worker_command(self) -> tuple[str, list[str]]:
        return self.target, []

    @property
    def extra_environment(self) -> dict[str, str]:
        return {}


def make_run_request(
    program: str | Path,
    *,
    nproc: Any = 2,
    device: Any = None,
    timeout_s: Any = 300.0,
    warm: Any = None,
    use: Any = None,
    hosts: Any = None,
    emulate: Any = None,
    **params: Any,
) -> RunRequest:
    """Validate the arguments of ``run`` without starting anything."""
    nproc = require_positive("nproc", nproc, int, "number of ranks")
    cores = len(requirements.usable_cores())
    if nproc > (most := RANKS_PER_CORE * cores):
        limit = f"{RANKS_PER_CORE} for each of {cores} cores = {most} is the limit"
        fix = "take fewer, or LABKIT_RECORDED=1 for results of the labs' runs on another machine"
        what = f"nproc = {nproc} is too many processes for this machine"
        raise ParameterError(f"{what}: {limit}; {fix}")
    hardware = resolve_emulated(emulate)
    if device is None:
        # Where GPUs are the default, emulated hardware still is this machine's CPU.
        device = "cpu" if hardware else read_choice(ENV_DEVICE, *DEVICES) or "auto"
    if not isinstance(device, str) or device not in DEVICES:
        raise ParameterError(f"device = {device!r} is none of {', '.join(DEVICES)}")
    if not isinstance(warm, bool | None):
        raise ParameterError(f"warm = {warm!r} is none of True, False and None (labkit chooses)")
    places = load_cluster().parse_hosts(hosts) if hosts is not None else []
    if network_namespace.is_namespace_requested() and places:
        rule = "keeps ranks to this machine, so none can run on hosts: unset it"
        raise ParameterError(f"{ENV_NETWORK}=own {rule}")
    if hardware:
        if device == "cuda" or places:
            what = "device='cuda'" if device == "cuda" else "hosts="
            rule = "emulate= lets ranks on this machine's CPU wait for other hardware"
            raise ParameterError(f"{rule}, so it cannot go with {what}: leave one out")
        device = "cpu"
    nproc *= max(1, len(places))
    fields = validate_program(program, params, nproc, timeout_s, warm, use)
    return RunRequest(device=device, hosts=places, emulate=hardware, **fields)


def resolve_emulated(emulate: Any) -> Emulated | None:
    """Return the hardware to emulate; raise ParameterError for what is neither it nor a name."""
    if emulate is None or isinstance(emulate, Emulated):
        return emulate
    if isinstance(emulate, str):
        slow_motion: Emulated = load_simulator("emulated_hardware").slow_motion(emulate)
        return slow_motion
    kinds = "give labkit.Emulated(latency_us=100, gb_per_s=0.3) or a name such as 'h100-8x'"
    raise ParameterError(f"emulate = {emulate!r} is no hardware: {kinds}")


def validate_program(
    program: str | Path, params: Mapping[str, Any], nproc: int, timeout_s: Any, warm: Any, use: Any
) -> dict[str, Any]:
    """Validate what runs and simulations have in common; return those fields of the request."""
    timeout_s = require_positive("timeout_s", timeout_s, float, "time limit in seconds")
    path, target = find_program(program)
    if use is not None:
        replaceable = program_source.read_replaceable(path)
        payload_pickling.validate_replacements(use, replaceable, path.stem)
    every, given = resolve_params(path, params, nproc)
    return {
        "program": path.stem,
        "program_path": str(path),
        "target": target,
        "params": every,
        "given_params": given,
        "nproc": nproc,
        "timeout_s": timeout_s,
        "warm": choose_warm_start(warm),
        "use": {name: payload_pickling.function_source(each) for name, each in (use or {}).items()},
    }


def require_positive(name: str, value: Any, wanted: type, what: str) -> Any:
    """Convert a value to an int or a float; raise ParameterError unless it is above 0."""
    with contextlib.suppress(ValueError):
        number = config.convert(value, wanted)
        if number > 0:
            return number
    fix = "give an int of at least 1" if wanted is int else "give a positive number"
    raise ParameterError(f"{name} = {value!r} is not a {what}: {fix}")


def execute_request(request: RunRequest, given: bytes) -> RunResult:
    """Run a request when it reaches the front of the queue; the ranks receive ``given``."""
    display = choose_display()

    def show_queue_position(before: int) -> None:
        runs = "1 run" if before == 1 else f"{before} runs"
        wait = f"waits for {runs} of this machine to end ({ENV_QUEUE}=0 does not wait)"
        display.show_wait_reason(f"{request.program}: {wait}")

    # With hosts, other machines do the work.
    local_ranks = 0 if request.hosts else len(request.active_ranks)
    with resource_limits.explain_shortage():
        _refuse_unusable_machine(request)
        with wait_for_turn(ResourceNeeds.for_run(local_ranks, request.device), show_queue_position):
            return _execute_now(request, given, display)


def _refuse_unusable_machine(request: RunRequest) -> None:
    """Raise LabError for conditions that would otherwise make the run fail late and obscurely."""
    try:
        os.getcwd()
    except FileNotFoundError:
        what = "the current folder was deleted, and PyTorch cannot be loaded from there"
        raise LabError(f"{what}: go to another (cd, os.chdir), or restart the kernel") from None
    if not request.hosts and (problem := requirements.loopback_problem()):
        why = "and ranks of one machine talk over it"
        raise LabError(f"{problem}, {why}: {requirements.LOOPBACK_FIX}")


def _execute_now(request: RunRequest, given: bytes, display: Display) -> RunResult:
    info = initial_run_info(request)
    folder = make_run_folder(info, given)
    progress = RunMonitor(folder, request.title, request.active_ranks, display)
    started = time.monotonic()
    try:
        warm = False if request.hosts else request.warm
        with fork_server_manager.server_for_run(warm) as fork_server:
            started = progress.state.start_time_s = time.monotonic()
            _run_ranks(request, folder, progress, fork_server, info)
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
        # Last, because a reader of the display may keep it waiting.
        progress.close(info["exit"])
    return load(folder.path)


def initial_run_info(request: RunRequest) -> dict[str, Any]:
    """Return the contents of run.json before the start."""
    # A checkout can be used without installing it.
    versions = [found.version for found in metadata.distributions(name="labkit")]
    return {
        "version": FORMAT_VERSION,
        **asdict(request),
        "hosts": [host.name for host in request.hosts],
        "python": platform.python_version(),
        "labkit": next(iter(versions), "unknown"),
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
        if not os.path.isfile(path):
            raise ParameterError(f"there is no program {str(path)[:MAX_SHOWN_CHARACTERS]}")
        ours = path.parent == ROOT / "launch" or _is_in_labkit(path)
        return path, ".".join(path.relative_to(ROOT).with_suffix("").parts) if ours else str(path)
    found = {path.stem: path for path in sorted((ROOT / "launch").glob("[!_]*.py"))}
    if str(program) not in found:
        fix = f"Give the path of a .py file or one of: {', '.join(found)}"
        name = str(program)[:MAX_SHOWN_CHARACTERS]
        raise ParameterError(f"no program is called {name!r}. {fix}")
    return found[str(program)], f"launch.{program}"


def _is_in_labkit(path: Path) -> bool:
    """Tell whether a file is a module of labkit or of a package beside it."""
    if not path.is_relative_to(ROOT):
        return False
    package, *inside = path.relative_to(ROOT).parts
    return package.startswith("labkit") and bool(inside)


def resolve_params(
    path: Path, params: Mapping[str, Any], nproc: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all parameters of the program by name, and those that the caller gave."""
    config_class = config.read_config(path)
    names = ", ".join(params)
    if params and config_class is None:
        what = f"{path.stem} has no class Config, so it takes no parameters"
        raise ParameterError(f"{what}: omit {names}")
    if config_class is None:
        return {}, {}
    if params and not config_class.is_loaded:
        what = f"{path.stem} never reads its Config, so {names} would change nothing"
        fix = "call rank.run_main(main, Config), or rank.load_config(Config)"
        raise ParameterError(f"{what}: {fix}")
    try:
        every = config.config_params(config.build_config(config_class, params, nproc))
    except ParameterError as error:
        raise ParameterError(f"{path.stem}: {error}") from None
    return every, {name: every[name] for name in params}


def make_run_folder(info: dict[str, Any], given: bytes, name: str = "") -> RunFolder:
    """Create the folder of a run with its run.json; raise LabError if that is impossible."""
    parent = folders.runs_folder()
    folder = RunFolder(parent / (name or make_run_name(info["program"])))
    try:
        private_files.make_private_folder(parent)
        if problem := folders.disk_problem(parent):
            raise LabError(problem)
        folder.path.mkdir(mode=private_files.FOLDER_MODE)
        write_json(folder.run_json, info)
        if given:
            folder.write_payload(given)
    except OSError as error:
        shortage = resource_limits.shortage_fix(str(error))
        fix = shortage or "set LABKIT_RUNS to a folder that can be written"
        raise LabError(f"cannot write to {parent} ({error.strerror}): {fix}") from error
    return folder


def make_run_name(program: str) -> str:
    """Return a unique folder name for a run of this program."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{program[:MAX_PROGRAM_NAME_CHARACTERS]}-{secrets.token_hex(3)}"


def write_run_end(info: dict[str, Any], folder: RunFolder, started: float) -> None:
    """Complete run.json; raise LabError if it cannot be written."""
    info = info | {"duration_s": round(time.monotonic() - started, 3)}
    # A broken file is reported with its name when the run is loaded.
    with contextlib.suppress(RecordError):
        session, verdict = read_json(folder.session_json), read_json(folder.verdict_json)
        info |= {"session": session, "verdict": verdict}
    try:
        try:
            write_json(folder.run_json, info)
        except OSError:
            # On a full disk this makes room for the end of the record.
            folder.remove_pids(info["nproc"])
            write_json(folder.run_json, info)
    except OSError as error:
        raise _folder_lost_error(folder) from error


def _folder_lost_error(folder: RunFolder) -> LabError:
    if folder.path.is_dir():
        problem = folders.disk_problem(folder.path)
        return LabError(problem or f"cannot write to {folder.path}: make it writable again")
    what = f"the run's folder {folder.path} was deleted during the run, so its results are lost"
    fix = "delete a run's folder only after its end, and not from its program"
    return LabError(f"{what}: {fix}")


def _run_ranks(
    request: RunRequest,
    folder: RunFolder,
    progress: RunMonitor,
    fork_server: ForkServer | None,
    info: dict[str, Any],
) -> None:
    """Start the ranks, wait for them and raise the first failure; leave no process behind."""
    backend = _make_backend(request, folder, fork_server)
    immortal: list[int] = []

    def has_failed() -> bool:
        progress.update()
        # Without the folder, ranks would wait for torchrun's files until the time limit.
        if not folder.path.is_dir():
            raise _folder_lost_error(folder)
        return bool(failure.read_rank_errors(folder))

    def raise_timeout() -> NoReturn:
        stacks = backend.stacks(request.active_ranks)
        raise failure.timeout_failure(folder, request.timeout_s, stacks)

    try:
        backend.start()
        # git is asked while the ranks start, so that it costs no time.
        info |= {"warm": backend.is_warm, "git_revision": git_revision()}
        status = watch_ranks(
            backend.wait, has_failed, timeout_s=request.timeout_s, on_timeout=raise_timeout
        )
    except KeyboardInterrupt as interrupt:
        # For %%torchrun. Other hosts might be slow to answer, and an interrupted run has to end.
        if not request.hosts:
            interrupt.stacks = backend.stacks(request.active_ranks)  # type: ignore[attr-defined]
        raise
    finally:
        _run_uninterrupted(lambda: immortal.extend(backend.stop()))
        folder.remove_torchrun_files()
    if immortal:
        what = f"processes {immortal} of {folder.path} did not die of SIGKILL"
        raise LabError(f"{what}: they wait for a device; restart the machine")
    if not folder.path.is_dir():
        raise _folder_lost_error(folder)
    if status != 0:
        raise failure.first_failure(folder, status)


def _make_backend(
    request: RunRequest, folder: RunFolder, fork_server: ForkServer | None
) -> Backend:
    if request.hosts:
        wanted = {name: getattr(request, name) for name in ("target", "params", "device")}
        wanted["nproc"] = request.local_world_size
        return cast(Backend, load_cluster().MultiHostBackend(folder, request.hosts, wanted))
    nproc = len(request.active_ranks)
    environment = process.rank_environment(folder, nproc, request.device)
    how = *request.worker_command, nproc, environment | request.extra_environment, fork_server
    return LocalBackend(folder, functools.partial(process.start_torchrun, folder, *how))


def _run_uninterrupted(work: Callable[[], None]) -> None:
    """Call ``work`` in a thread, out of reach of a second KeyboardInterrupt."""
    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:
        # The system allows no more threads.
        work()
    else:
        thread.join()


def exit_label(error: BaseException) -> str:
    """Return the value of "exit" in run.json for a run that ended with this error."""
    if isinstance(error, RunTimedOut):
        return "timed out"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def git_revision() -> str | None:
    """Return the commit of labkit's checkout, or None if it is not one."""
    # An installed labkit may lie in the environment of another repository.
    if not folders.IN_CHECKOUT:
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    # There may be no git, or only a copy of the files.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        quiet = subprocess.DEVNULL
        return subprocess.check_output(command, stderr=quiet, text=True, timeout=5).strip()
    return None
