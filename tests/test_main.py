"""The command line: a program's own options, what it refuses, how it is interrupted, and its exit status."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from labkit import __main__ as command_line
from labkit.__main__ import main, parse_run_command

MISBEHAVE = Path(__file__).parent / "programs" / "misbehave.py"
PROGRAM = '''
"""Says what it was given."""
from dataclasses import dataclass, field
from typing import ClassVar, Literal
import torch
from labkit.config import PositiveInt

@dataclass
class Config:
    PRESETS: ClassVar[dict[str, dict]] = {"large": {"steps": 9, "dims": (3, 4)}}
    preset: Literal["small", "large"] = "small"
    steps: PositiveInt = 3
    """Timed steps,
    after one to warm up."""
    rate: float = 0.1
    mesh: str = "2x2"
    dims: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    limit: int | None = 5
    fast: bool = False
    strategy: Literal["local", "dtensor"] = "local"

if __name__ == "__main__":
    from labkit.rank import load_config
    print("given", load_config(Config))
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "says.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--steps 4 --rate=1e-3", {"steps": 4, "rate": 0.001}),
        ("--mesh 4", {"mesh": "4"}),
        ("--dims 8 16 32", {"dims": (8, 16, 32)}),
        ("--dims 8", {"dims": (8,)}),
        ("--names 1 b", {"names": ("1", "b")}),
        ("--limit None", {"limit": None}),
        ("--fast --strategy dtensor", {"fast": True, "strategy": "dtensor"}),
        ("--fast --no-fast", {}),
        ("--rate -1", {"rate": -1.0}),
        ("--steps 3", {}),
        ("--preset large", {"preset": "large"}),
        ("--preset=large --steps 3 --dims", {"preset": "large", "steps": 3, "dims": ()}),
    ],
)
def test_parameters_are_read_by_the_type_of_their_field(program, words, expected):
    command, parameters = parse_run_command(program, [*words.split(), "--nproc", "3"])
    assert parameters == expected
    assert (command.program, command.nproc, command.device, command.timeout_s) == (program, 3, None, 300)


def status(*arguments):
    """The exit status, whoever leaves: main or tyro."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stepps 4", "Perhaps you meant: --steps INT Timed steps, after one to warm up. (int ≥ 1) (default: 3)"),
        ("7", "Unrecognized options: 7"),
        ("--steps 4.5", "Error parsing --steps: invalid literal for int() with base 10: '4.5'"),
        ("--strategy fast", "invalid choice 'fast' for argument '--strategy'. Expected one of ('local', 'dtensor')"),
        ("--steps 0", "says: steps = 0 is not int ≥ 1. Allowed:"),
        ("--nproc 0", "nproc = 0"),
        ("--device gpu", "invalid choice 'gpu' for argument '--device'"),
    ],
)
def test_a_bad_parameter_gives_status_2_and_what_is_allowed(program, words, says, capsys):
    assert status("run", program, *words.split()) == 2
    error = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert says in error and "Traceback" not in error


def test_help_lists_the_options_of_run_and_of_the_program(program, capsys):
    assert status("run", program, "--preset", "large", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert f"python -m labkit run {program}" in shown
    assert "--nproc INT Number of ranks. (default: 2)" in shown
    assert "--timeout-s FLOAT Seconds after which the run is stopped. (default: 300)" in shown
    assert "says's own options" in shown
    assert "--steps INT Timed steps, after one to warm up. (int ≥ 1) (default: 9)" in shown, "of this preset"
    assert "--strategy {local,dtensor} (default: local)" in shown
    assert "--fast, --no-fast (default: False)" in shown
    assert "(default: 3 4)" in shown


@pytest.mark.parametrize("name", ["all_reduce", "convnext_spatial", "decoder", "fsdp_wrap"])
def test_help_of_a_lab_has_every_field_with_its_docstring_and_does_not_import_torch(name):
    code = (
        "import sys\nfrom labkit.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as left:\n    print(left.code, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "run", name, "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.stdout.splitlines()[-1] == "0 False", answer.stderr
    shown = " ".join(answer.stdout.replace("│", "").split())
    path, _ = command_line.find_program(name)
    config_class = command_line.config.read_config(path)
    assert config_class is not None
    for field, doc in config_class.field_docs.items():
        assert f"--{field.replace('_', '-')}" in shown
        assert " ".join(doc.split()) in shown


def test_a_program_without_config_takes_no_parameters(tmp_path, capsys):
    path = tmp_path / "plain.py"
    path.write_text("print('hello')\n")
    assert status("run", str(path), "--help") == 0
    assert "plain has no class Config, so it takes no parameters." in capsys.readouterr().out
    assert status("run", str(path), "--width", "3") == 2
    assert capsys.readouterr().err == "plain has no class Config, so it takes no parameters: omit --width 3\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "run, show, doctor"),
        (["run"], "PROGRAM"),
        (["run", "nothing_so_called"], "no program is called 'nothing_so_called'. Give the path of a .py file or one"),
        (["show"], "its folder's name"),
        (["doctor", "--steps", "3"], "Unrecognized options: --steps, 3"),
    ],
)
def test_a_command_that_is_not_complete_gives_status_2(arguments, says, capsys):
    assert status(*arguments) == 2
    assert says in capsys.readouterr().err


def test_show_of_no_run_gives_status_1(tmp_path, capsys):
    assert status("show", str(tmp_path)) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.fixture
def copies(tmp_path_factory):
    """A folder of a learner's copies."""
    folder = tmp_path_factory.mktemp("my")
    (folder / ".labkit" / "pristine").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["show", 5000 * "x"], 1, "no run in"),
        (["runs", "show", 5000 * "x"], 1, "no run in"),
        (["run", 5000 * "x"], 2, "no program is called 'xxx"),
        (["run", 5000 * "x" + ".py"], 2, "there is no program /"),
        (
            ["export", "--name", "me", "--folder", "COPIES", 5000 * "x"],
            1,
            "File name too long, so it cannot be written; give another file",
        ),
        (["runs", "--limit", "-5"], 2, "limit = -5 is negative: give how many, or 0 for all"),
    ],
)
def test_names_of_thousands_of_characters_and_negative_limits_get_one_line(words, code, says, copies, capsys):
    assert status(*[str(copies) if word == "COPIES" else word for word in words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and len(line) < 6000


def test_a_long_name_of_a_learner_makes_a_file(tmp_path, copies, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status("export", "--name", 5000 * "x", "--folder", str(copies)) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"labkit-{100 * 'x'}.json"]


@pytest.mark.parametrize("words", [["--help"], ["runs"]])
def test_what_a_terminal_cannot_show_is_replaced_and_a_closed_one_ends_nothing(words, tmp_path):
    command = [sys.executable, "-m", "labkit", *words]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "LABKIT_RUNS": str(tmp_path / "Łódź")}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ascii_only)
    assert shown.returncode == 0 and "?" in shown.stdout and not shown.stderr
    closed = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, preexec_fn=partial(os.close, 1))
    assert (closed.returncode, closed.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (
        told.returncode == 1
        and told.stderr == "No space left on device: the output: make room, or write to another disk\n"
    )


def test_ctrl_c_ends_in_one_line_with_status_130(tmp_path):
    pids, runs = tmp_path / "pids", tmp_path / "runs"
    command = [
        sys.executable,
        "-m",
        "labkit",
        "run",
        str(MISBEHAVE),
        "--nproc",
        "1",
        "--rank",
        "0",
        "--pids",
        str(pids),
    ]
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # ignored in what a shell's & started
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LABKIT_RUNS": str(runs), "LABKIT_PROGRESS": "off"},
        preexec_fn=heed,
    )
    try:
        give_up = time.monotonic() + 60
        while not pids.exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=30)
    finally:
        running.kill()
    assert (running.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    left = [psutil.Process(pid) for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    alive = [each for each in psutil.wait_procs(left, timeout=5)[1] if each.status() != psutil.STATUS_ZOMBIE]
    assert alive == []


def test_the_docs_and_the_docstring_give_the_same_exit_statuses(repository):
    lines = (repository / "docs" / "command_line.md").read_text().split("| exit status |")[1].splitlines()[2:]
    rows = takewhile(lambda line: line.startswith("|"), lines)
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in rows]
    told = (command_line.__doc__ or "").split("Exit status:")[1].strip().splitlines()
    assert [line.split(maxsplit=1) for line in told] == table
    assert [number for number, _ in table] == ["0", "1", "2", "130"]


def test_run_hands_the_parameters_to_the_ranks_and_show_reads_the_run(program):
    command = [sys.executable, "-m", "labkit", "run", program, "--nproc", "1", "--dims", "8", "16", "--fast"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert "dims=(8, 16)" in answer.stderr and "fast=True" in answer.stderr
    folder = answer.stdout.strip().splitlines()[-1].removeprefix("recorded in ")
    assert main(["show", folder]) == 0


def test_a_failed_run_gives_status_1_and_the_rank_s_own_error(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("raise ValueError('too wide')\n")
    command = [sys.executable, "-m", "labkit", "run", str(path), "--nproc", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 1
    assert "ValueError: too wide" in answer.stderr
    assert "labkit/__main__.py" not in answer.stderr
