"""The commands of a course. Each returns its exit status, or None for 0."""

import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from labkit.errors import LabError, ParameterError
from labkit_course import copies, exports, judging, jupyter, lab_catalog, verdict_store

FILE = tyro.conf.arg(metavar="PROGRESS_FILE")
NOTEBOOK = tyro.conf.arg(metavar="NOTEBOOK")
LAB = tyro.conf.arg(metavar="LAB", help="The lab: its number, or the notebook's name.")
LabName = Annotated[tyro.conf.Positional[str], LAB]
HERE = tyro.conf.arg(help="Where the copies are; by default my/.")
CopiesFolder = Annotated[Path | None, HERE]


def start_lab(
    name: LabName = "0",
    /,
    browser: bool = True,
    folder: CopiesFolder = None,
    jupyter_options: tuple[str, ...] = (),
) -> None:
    """Open JupyterLab on your own copies of the labs, which are made where they are missing.

    Args:
        name: The lab to open.
        browser: Open a browser; otherwise the address is printed.
        folder: Where the copies are.
        jupyter_options: Options of JupyterLab, as one ends: --jupyter-options=--port=9999
    """
    place, wanted = _copies_folder(folder), lab_catalog.find_lab(name)
    for made in copies.make_copies(place):
        print(f"made {place / made.path.name}")
    if new := ", ".join(each.name for each in copies.labs_to_update(place)):
        fix = "`python -m labkit update` brings it into your copies."
        print(f"There is something new in {new}: {fix}")
    jupyter.exec_jupyter(place, wanted.path.name, browser=browser, more=jupyter_options)


def reset_lab(name: LabName, /, folder: CopiesFolder = None) -> None:
    """Begin a lab again with a fresh copy; the earlier one is kept in my/earlier/."""
    place, wanted = _copies_folder(folder), lab_catalog.find_lab(name)
    kept = copies.reset_copy(wanted, place)
    print(f"made {place / wanted.path.name}" + (f"; the earlier one is {kept}" if kept else ""))


def update_labs(folder: CopiesFolder = None) -> int:
    """Bring what is new in the labs into your copies. What you changed stays, and is listed."""
    said, problems = copies.update_copies(_copies_folder(folder))
    print("\n".join(said))
    return _print_problems(problems)


def show_progress(folder: CopiesFolder = None) -> None:
    """Show which exercises have passed."""
    print(verdict_store.progress_text(_load_verdicts(folder)))


def export_progress(
    file: Annotated[tyro.conf.Positional[Path | None], FILE] = None,
    /,
    name: str | None = None,
    folder: CopiesFolder = None,
) -> None:
    """Write one file for a teacher: your name, labkit's version, and what the checks said.

    Args:
        file: The file to write; by default labkit-NAME.json here.
        name: Your name; asked for in a terminal, otherwise that of your account.
        folder: Where the copies are.
    """
    known = _load_verdicts(folder)
    whose = (name if name is not None else _ask_name()).strip()
    # A name may hold spaces and slashes, and be long; its file's name may not.
    plain = "".join(letter if letter.isalnum() else "_" for letter in whose)[:100]
    path = file or Path(f"labkit-{plain}.json")
    exports.write_export(path, whose, known)
    passed = sum(each.state == "passed" for lab in known.values() for each in lab.values())
    print(f"wrote {path}, of {whose}; exercises passed: {passed}")


def _ask_name() -> str:
    try:
        account = getpass.getuser()
    # In a container the user may have no name.
    except (OSError, KeyError):
        account = ""
    if not sys.stdin.isatty():
        return account
    return input(f"Your name, for your teacher [{account}]: ").strip() or account


def collect_exports(
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], FILE],
    /,
    csv: Path | None = None,
    html: Path | None = None,
) -> int:
    """Make one table of many learners' exports; status 1 if a file was left out, which is said.

    Args:
        files: What `export` wrote.
        csv: Where to write the table for a spreadsheet.
        html: Where to write it as a page.
    """
    if not files:
        raise ParameterError("no file is given: name those that `export` wrote, such as *.json")
    found, problems = exports.newest_exports(files)
    frame = exports.progress_frame(found)
    if csv:
        exports.write_csv(frame, csv)
    if html:
        exports.write_html(frame, html)
    written = " and ".join(str(path) for path in (csv, html) if path)
    print(f"{len(found)} of {len(files)} files{' in ' if written else ''}{written}")
    if found and not written:
        print(frame["passed"].to_string())
    return _print_problems(problems)


def judge_notebooks(
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], NOTEBOOK],
    /,
    cell_timeout_s: float = 300,
) -> int:
    """Execute notebooks in fresh kernels; status 1 unless every exercise passes. No file changes.

    Args:
        files: Copies of labs, such as my/02_fsdp_wrapping.ipynb.
        cell_timeout_s: Seconds that one cell may take.
    """
    if not files:
        raise ParameterError("no notebook is given: name copies of labs, such as my/*.ipynb")
    all_pass = True
    for path in files:
        print(f"executes {path}, which starts ranks", file=sys.stderr, flush=True)
        judgement = judging.judge_notebook(path, cell_timeout_s)
        print(f"{path}: {judgement}", flush=True)
        all_pass = all_pass and judgement.ok
    return 0 if all_pass else 1


def _print_problems(problems: list[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


# The shell leaves the ~ of --folder=~/my as it is.
def _copies_folder(named: Path | None) -> Path:
    return (named or copies.default_copies_folder()).expanduser().resolve()


def _load_verdicts(folder: Path | None) -> verdict_store.Verdicts:
    place = _copies_folder(folder)
    path = place / verdict_store.PROGRESS_FILE
    if not (copies.has_copies(place) or path.exists()):
        fix = "go to the folder that holds my/, or name yours with --folder"
        raise LabError(f"{place} holds no copies of the labs: {fix}")
    return verdict_store.read_verdicts(path)


COMMANDS: dict[str, Callable[..., Any]] = {
    "lab": start_lab,
    "reset": reset_lab,
    "update": update_labs,
    "progress": show_progress,
    "export": export_progress,
    "collect": collect_exports,
    "judge": judge_notebooks,
}
