"""Run a rank program inside one rank: ``python -m labkit.launcher.worker PROGRAM``.

PROGRAM is the path of a .py file or a module name; what follows is its command line. It behaves
as under a bare torchrun, and besides: output goes to the rank's log, an exception to its error
file, SIGUSR1 dumps the stacks, SIGUSR2 the collectives that are not done, and the rank dies with
torchrun. To start fast, this imports nothing that is large, such as torch.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from importlib.abc import SourceLoader
from pathlib import Path
from typing import Any, NoReturn

from labkit import environment
from labkit.environment import ENV_HOST_NAME, ENV_RUN_FOLDER, ENV_TORCHRUN_PID
from labkit.errors import shorten
from labkit.runs import private_files
from labkit.runs.folder import RunFolder, rank_of_process, write_json, write_text
from labkit.session import pending_calls
from labkit.session.process_exit import exit_process, exit_status, print_error_and_status

PR_SET_PDEATHSIG = 1
CONNECTION_LOSS_WORDS = (
    *("connection closed by peer", "connection reset", "connection refused", "connection aborted"),
    *("broken pipe", "socket closed", "closed the connection", "timed out waiting", "wait timeout"),
    *("remote process exited", "nccl communicator was aborted"),
)

NCCL_CAUSES = ("duplicate gpu", "out of memory", "invalid usage", "invalid argument")


def main() -> NoReturn:
    """Run the program named in sys.argv as this rank, and exit."""
    _die_with_torchrun()
    rank = rank_of_process(int(os.environ["RANK"]))
    folder = RunFolder(Path(os.environ[ENV_RUN_FOLDER]))
    os.environ["RANK"] = str(rank)
    with private_files.open_file(folder.log(rank), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stacks = private_files.open_file(folder.stack(rank), "w")
    # Native crashes write the Python stacks there.
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    pending_calls.answer_on_signal(stacks)
    if ENV_HOST_NAME in os.environ:
        write_text(folder.host(rank), os.environ[ENV_HOST_NAME])
    # Last, because a reader of this file may send SIGUSR1 at once.
    write_text(folder.pid(rank), str(os.getpid()))
    status = 1
    try:
        status = _run_to_exit_status(folder.error(rank), rank)
    finally:
        exit_process(status)


def _run_to_exit_status(error_file: Path, rank: int) -> int:
    """Run the program and return its exit status; write an exception to error file and log."""
    try:
        _refuse_smaller_world()
        run_program(sys.argv[1], sys.argv[2:])
    except BaseException as error:
        # The leading frames are not the learner's code.
        while error.__traceback__ and _is_launcher_frame(error.__traceback__.tb_frame):
            error.__traceback__ = error.__traceback__.tb_next
        if exit_status(error):
            # Before it is printed, because torchrun may end this rank between the two.
            _write_error_file(error_file, rank, error)
        return print_error_and_status(error)
    return 0


def _is_launcher_frame(frame: types.FrameType) -> bool:
    # A module that runs the program itself hides its frames with a global ``__tracebackhide__``.
    return frame.f_code.co_filename == __file__ or "__tracebackhide__" in frame.f_globals


def _refuse_smaller_world() -> None:
    # Otherwise each host that cannot reach the others would train alone.
    size, asked = os.environ.get("WORLD_SIZE"), os.environ.get(environment.ENV_EXPECTED_WORLD_SIZE)
    if asked and asked != size:
        host = os.environ.get(ENV_HOST_NAME, "this host")
        fix = "or torchrun was started by other means; let labkit start it on all hosts"
        what = f"is in a world of {size} ranks, and {asked} were asked for"
        raise RuntimeError(f"{host} {what}: it went on alone, {fix}")


def is_echo(error: BaseException) -> bool:
    """Tell whether an exception looks like the consequence of another rank's failure."""
    # Such as an error that says what was to be saved when another rank left.
    if error.__context__ and is_echo(error.__context__):
        return True
    text = _error_text(error).lower()
    # NCCL's own failures have the same class as those that follow another rank's.
    if any(cause in text for cause in NCCL_CAUSES):
        return False
    # torch is not imported here, so its class is known by name.
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    kinds = RuntimeError | OSError
    return isinstance(error, kinds) and any(known in text for known in CONNECTION_LOSS_WORDS)


def _die_with_torchrun() -> None:
    if sys.platform != "linux":
        return
    # Linux kills this process when torchrun dies, however it dies.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # torchrun may have died before the request.
    if os.getppid() != int(os.environ.get(ENV_TORCHRUN_PID, os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


def run_program(program: str, arguments: list[str]) -> None:
    """Run the program as ``python PROGRAM`` or ``python -m PROGRAM`` would."""
    # Not with runpy: the module stays __main__ to the end, which exit functions and threads need.
    sys.argv = [program, *arguments]
    module = types.ModuleType("__main__")
    if program.endswith(".py"):
        folder = Path(program).parent
        sys.path.insert(0, str(folder))
        _unload_shadowed_modules(folder)
        code: Any = compile(Path(program).read_bytes(), program, "exec")
        vars(module).update(__file__=program, __cached__=None)
    else:
        spec = importlib.util.find_spec(program)
        assert spec and spec.origin and isinstance(spec.loader, SourceLoader)
        sys.argv[0] = spec.origin
        code = spec.loader.get_code(program)
        vars(module).update(
            __file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader
        )
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _unload_shadowed_modules(folder: Path) -> None:
    """Let the program import its own statistics.py rather than the one that torch has imported."""
    # Modules that every rank needs stay: a torch.py beside the program is not PyTorch.
    own = {path.stem for path in folder.glob("*.py")}
    own |= {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in own & sys.modules.keys() - {"__main__", "labkit", "numpy", "torch"}:
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = (spec and spec.origin) or ""
        if origin not in ("", "frozen", "built-in") and not Path(origin).is_relative_to(folder):
            inside = [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]
            for each in inside:
                del sys.modules[each]


def _write_error_file(path: Path, rank: int, error: BaseException) -> None:
    ended = f"exit status {error.code}" if isinstance(error, SystemExit) else _error_text(error)
    content = {
        "rank": rank,
        # Several hosts compare times by the clock of the first.
        "time": time.time() + float(os.environ.get(environment.ENV_CLOCK_AHEAD_S, 0)),
        "exc_type": type(error).__name__,
        "message": shorten(ended),
        "traceback": shorten("".join(traceback.format_exception(error))),
        "echo": is_echo(error),
    }
    # The launcher notices a full disk or a deleted folder itself.
    with contextlib.suppress(OSError):
        write_json(path, content)


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:
        # The program's own code may raise anything.
        return f"(no text: its __str__ raises {type(another).__name__})"


if __name__ == "__main__":
    main()
