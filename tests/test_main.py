"""The command line: how it reads a program's own parameters, and its exit status."""

import subprocess
import sys

import pytest

import labkit
from labkit.__main__ import main, read_parameters

PROGRAM = '''
"""Says what it was given."""
from dataclasses import dataclass, field
from typing import Literal

@dataclass
class Config:
    steps: int = 3
    rate: float = 0.1
    mesh: str = "2x2"
    dims: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    limit: int | None = 5
    fast: bool = False
    strategy: Literal["local", "dtensor"] = "local"

if __name__ == "__main__":
    from labkit.config import parse_argv
    print("given", parse_argv(Config))
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
        ("--no-fast", {"fast": False}),
        ("--rate -1", {"rate": -1.0}),
        ("--unknown-one 3", {"unknown_one": "3"}),
    ],
)
def test_parameters_are_read_by_the_type_of_their_field(program, words, expected):
    assert read_parameters(program, words.split()) == expected


def test_an_argument_without_a_name_is_refused(program):
    with pytest.raises(labkit.ParameterError, match="7: a parameter is written --name value"):
        read_parameters(program, ["7"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stepps 4", "did you mean 'steps'"),
        ("--steps 4.5", "4.5"),
        ("--strategy fast", "dtensor"),
        ("--nproc 0", "nproc = 0"),
    ],
)
def test_a_bad_parameter_gives_status_2_and_one_message(program, words, says, capsys):
    assert main(["run", program, *words.split()]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_show_of_no_run_gives_status_1(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_options_of_a_program_are_not_swallowed_elsewhere(tmp_path, capsys):
    assert main(["show", str(tmp_path), "--steps", "3"]) == 2
    assert "--steps 3" in capsys.readouterr().err


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
