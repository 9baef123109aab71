"""The command line.

    python -m labkit doctor                       # what this machine can do
    python -m labkit run convnext_spatial --nproc 4 --width 256  # as labkit.run in a notebook
    python -m labkit run convnext_spatial --help  # the parameters of this program
    python -m labkit simulate fsdp_wrap --world-size 1024 --dim 4096  # memory, traffic
    python -m labkit simulate fsdp_wrap --world-size 16 --hardware h100-8x  # step time
    python -m labkit plan decoder --model llama_2_7b --world-size 16 64  # what fits?

    python -m labkit runs                         # the newest runs; --program NAME, --limit 100
    python -m labkit runs show a1b2c3             # one of them, by the end of its name, or a path
    python -m labkit runs compare a1b2c3 d4e5f6   # parameters and values side by side
    python -m labkit runs prune --keep 100        # remove older ones; --older-than 30 days

    python -m labkit lab                          # JupyterLab on your copies of the labs, in my/
    python -m labkit update                       # what is new in the labs, into your copies
    python -m labkit reset 2                      # a fresh copy of lab 2; yours is kept
    python -m labkit progress                     # which exercises have passed
    python -m labkit export                       # the same as a file for a teacher
    python -m labkit collect *.json --csv table.csv --html table.html
    python -m labkit judge my/*.ipynb             # executes them; status 1 unless all passes

Exit status:

    0     done
    1     the run failed, a check is not ok, a file cannot be read or written, or a lab cannot run
    2     the command line is wrong, or a parameter is refused; nothing was launched
    130   interrupted with Ctrl-C; the ranks are gone
"""

import errno
import functools
import importlib
import json as json_module
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro

import labkit
from labkit import config, doctor
from labkit.launcher.progress import redirect_to_devnull
from labkit.launcher.run import find_program
from labkit.runs import history
from labkit.runs.folder import runs_folder
from labkit.theory.sizes import readable_bytes

PROG = "python -m labkit"
# Modules of the packages beside the core. COMMANDS of the first are like RunCommand, by name; those
# of the second are functions that return an exit status.
PROGRAM_COMMANDS = "labkit_simulate.commands"
COURSE_COMMANDS = "labkit_course.commands"
PRUNE_PREVIEW_ROWS = 10
MAX_NAME_CHARACTERS = 80
# Errors of any command that a name or a disk explains, and the fix.
SHORT_ERRORS = {
    errno.ENAMETOOLONG: "no file has so long a name: give a shorter one",
    errno.ENOSPC: "make room, or write to another disk",
}
RUN = tyro.conf.arg(
    metavar="RUN", help="A run: its folder's name, the end of that name, or a path."
)


@dataclass
class RunCommand:
    """Launch a rank program and print its summary; ``run PROGRAM --help`` lists its parameters."""

    program: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROGRAM")]
    """A name in launch/, or the path of a Python file."""
    nproc: int = 2
    """Number of ranks."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where the ranks compute; by default what LABKIT_DEVICE says, or auto: GPUs if there is one a
    rank, else the CPU."""
    timeout_s: float = 300
    """Seconds after which the run is stopped."""

    # The text of --help, and whether each parameter of the program takes several values.
    about: ClassVar[str] = "Launch {program} and show its summary."
    takes_lists: ClassVar[bool] = False

    def execute(self, **arguments: Any) -> int:
        """Launch the program and print its summary; return 1 if a check is not ok."""
        result = labkit.run(**arguments)
        print(result.table_text())
        if result.verdict_text:
            print(result.verdict_text)
        print(f"recorded in {result.folder}")
        return 0 if result.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; tyro exits when the arguments are wrong."""
    _prepare_streams()
    try:
        status = _dispatch_command(sys.argv[1:] if arguments is None else list(arguments))
        # A closed pipe must raise here, where it is handled, rather than at exit.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        # An interrupted search says where its results are kept.
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # As in `labkit ... | head`.
        redirect_to_devnull(sys.stdout)
        return 1
    except (labkit.LabError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, labkit.ParameterError) else 1
    except OSError as error:
        if error.errno not in SHORT_ERRORS:
            raise
        place = str(error.filename or "the output")[:MAX_NAME_CHARACTERS]
        print(f"{error.strerror}: {place}: {SHORT_ERRORS[error.errno]}", file=sys.stderr)
        return 1


def _prepare_streams() -> None:
    """Let stdout and stderr take any text, and replace one that is closed, as by ``>&-``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # A terminal may know less than UTF-8; stderr already shows what it cannot encode.
        elif getattr(stream, "errors", "") == "strict":
            stream.reconfigure(errors="replace")


def _dispatch_command(words: list[str]) -> int:
    name, *rest = words or [""]
    programs = program_commands()
    if name in programs and rest and not rest[0].startswith("-"):
        return execute_command(*parse_run_command(rest[0], rest[1:], name))
    if name == "runs":
        # `runs` alone lists, and so does `runs --limit 100`.
        if not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help")):
            rest = ["list", *rest]
        return _run_subcommand(HISTORY_COMMANDS, rest, f"{PROG} runs")
    course = importlib.import_module(COURSE_COMMANDS).COMMANDS
    return _run_subcommand(TOP_COMMANDS | programs | course, words, PROG)


def _run_subcommand(commands: Mapping[str, Callable[..., Any]], words: list[str], prog: str) -> int:
    done: Any = tyro.extras.subcommand_cli_from_dict(dict(commands), prog=prog, args=words)
    # A function has done its work, and returns its exit status or None; a class has none yet.
    return done or 0 if isinstance(done, int | None) else execute_command(done, {})


def program_commands() -> dict[str, Any]:
    """Return the commands that take a program: run, and those of the packages beside the core."""
    return {"run": RunCommand} | importlib.import_module(PROGRAM_COMMANDS).COMMANDS


def parse_run_command(
    program: str, words: Sequence[str], name: str = "run"
) -> tuple[Any, dict[str, Any]]:
    """Parse a command's options, and the program's parameters that are not at their defaults."""
    path, _ = find_program(program)
    kind, prog = program_commands()[name], f"{PROG} {name}"
    config_class = config.read_config(path)
    if config_class is None:
        about = f"{path.stem} has no class Config, so it takes no parameters"
        parse = functools.partial(tyro.cli, kind, prog=prog, description=f"{about}.")
        command, unknown = parse(args=[program, *words], return_unknown_args=True)
        if unknown:
            raise labkit.ParameterError(f"{about}: omit {' '.join(unknown)}")
        return command, {}
    own = {each.name for each in fields(kind)}
    options = config.cli_dataclass(config_class, words, own, kind.takes_lists)
    # The help shows the program's parameters in a group of their own, without a prefix.
    its_own = tyro.conf.arg(name=f"{path.stem}'s own")
    parameters: Any = Annotated[options, tyro.conf.OmitArgPrefixes, its_own]
    added = [
        ("program", tyro.conf.Suppress[str], field(default=program)),
        ("parameters", parameters, field(default_factory=options)),
    ]
    combined = make_dataclass(kind.__name__.removesuffix("Command"), added, bases=(kind,))
    about = kind.about.format(program=program)
    command = tyro.cli(combined, prog=f"{prog} {program}", description=about, args=words)
    defaults, values = vars(options()), vars(command.parameters)
    return command, {name: value for name, value in values.items() if value != defaults[name]}


def execute_command(command: Any, parameters: dict[str, Any]) -> int:
    """Run a command like RunCommand with the program's parameters; return the exit status."""
    own = {name: value for name, value in vars(command).items() if name != "parameters"}
    return command.execute(**own, **parameters)


def list_runs(program: str | None = None, limit: int = 20) -> None:
    """List recorded runs, the newest first. See also `runs show`, `runs compare` and `runs prune`.

    Args:
        program: Only runs of this program.
        limit: How many, at most; 0 lists all.
    """
    if limit < 0:
        raise labkit.ParameterError(f"limit = {limit} is negative: give how many, or 0 for all")
    found = history.find_runs(program=program)
    shown = found[: limit or None]
    if shown:
        print(history.format_table(shown))
    print(f"{len(shown):,} of {len(found):,} runs in {runs_folder()}")


def show_run(run: Annotated[tyro.conf.Positional[str], RUN]) -> None:
    """Show one run: its folder, how it ended, its values by rank."""
    result = labkit.load(history.find_run_folder(run))
    print(f"{result.folder}\n{result}")


def compare_runs(runs: Annotated[tyro.conf.Positional[tuple[str, ...]], RUN]) -> None:
    """Show the parameters in which two runs or more differ, and their values, side by side."""
    compared = history.compare(labkit.load(history.find_run_folder(run)) for run in runs)
    texts = compared.map(lambda each: f"{each:,.6g}" if isinstance(each, float) else str(each))
    print(texts.to_string())


def prune_runs(
    keep: int | None = None,
    older_than: float | None = None,
    program: str | None = None,
    yes: bool = False,
) -> int:
    """Remove old runs, after asking. Other folders, and runs that may still go on, stay.

    Args:
        keep: Keep this many of the newest.
        older_than: Remove only runs that began more than this many days ago.
        program: Only runs of this program.
        yes: Do not ask.
    """
    old = history.find_prunable_runs(keep=keep, older_than_days=older_than, program=program)
    if not old:
        print("nothing to remove")
        return 0
    print(history.format_table(old[:PRUNE_PREVIEW_ROWS]))
    found = f"{len(old):,} runs, {readable_bytes(history.total_bytes(old))}, in {runs_folder()}"
    print(f"{found}; the newest of them are above")
    if not yes and not _confirm_removal():
        print("nothing was removed")
        return 0
    left = history.prune(old)
    print("\n".join([*left, f"removed {len(old) - len(left):,} runs"]))
    return 1 if left else 0


def _confirm_removal() -> bool:
    # A script must not wait for an answer that no one gives.
    if not sys.stdin.isatty():
        raise labkit.ParameterError("nobody can be asked here: --yes removes them without asking")
    try:
        return input("Remove them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def print_diagnosis(json: bool = False) -> int:
    """Print what this machine can do and how to fix the rest; return 1 if a lab cannot run here.

    Args:
        json: Print one JSON object instead of text.
    """
    report = doctor.run_checks()
    content = {"ok": report.ok, **asdict(report)}
    print(json_module.dumps(content, indent=2) if json else report)
    return 0 if report.ok else 1


TOP_COMMANDS: dict[str, Callable[..., Any]] = {
    "run": RunCommand,
    "show": show_run,
    "doctor": print_diagnosis,
    "runs": list_runs,
}
HISTORY_COMMANDS: dict[str, Callable[..., int | None]] = {
    "list": list_runs,
    "show": show_run,
    "compare": compare_runs,
    "prune": prune_runs,
}

if __name__ == "__main__":
    sys.exit(main())
