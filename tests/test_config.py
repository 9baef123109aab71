"""A program's Config: read without running it, checked, written as a command line and read back by the rank."""

import subprocess
import sys
import textwrap

import numpy
import pytest

from labkit import config
from labkit.errors import ParameterError

PROGRAM = '''
"""A program that must not be run to read its Config."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Literal
import torch
import nowhere_to_be_found
from labkit import rank, errors
from labkit.nowhere import more

SIZES = (32, 64)
Strategy = Literal["native", "local"]
torch.explode()
raise SystemExit("the program was run")

@dataclass
class Config:
    """What to train."""

    PRESETS: ClassVar[dict[str, dict]] = {"paper": {"width": 1024, "dims": (256, 512), "save": True}}
    preset: Literal["small", "paper"] = "small"
    """Which sizes to start from."""
    width: int = 512
    """Image width in pixels; a rank
    holds width / ranks columns."""
    learning_rate: float = 1e-4
    strategy: Strategy = "local"
    dims: tuple[int, ...] = SIZES
    tile: tuple[int, float] = (3, 0.5)
    save: bool = False
    shuffle: bool = True
    limit: int | None = None
    title: str = "strips"

    def validate(self, world_size: int) -> None:
        if self.width % world_size:
            raise ValueError(f"{world_size} ranks cannot share width {self.width}")
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "strips.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def config_class(program):
    return config.read_config(program)


def read(tmp_path, source):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    return config.read_config(path)


def test_read_config_runs_neither_the_program_nor_torch(program):
    code = f"""
import sys
from pathlib import Path
from labkit.config import read_config
made = read_config(Path({str(program)!r}))()
print(made.width, made.dims, "torch" in sys.modules, sorted(name for name in sys.modules if "config of" in name))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.split("\n")[0] == "512 (32, 64) False []"


def test_a_program_without_config(tmp_path):
    assert read(tmp_path, "import torch\n") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def broken(:\n  pass", "program.py:1: not valid Python"),
        ("class Config:\n    width: int = 1", "must be a @dataclass"),
        (
            "from dataclasses import dataclass\nimport torch\n@dataclass\nclass Config:\n    kind: str = torch.float32",
            "program.py:4: class Config: name 'torch' is not defined; it is read without running the program",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: Missing = 1",
            "name 'Missing' is not defined",
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int", "no default for width"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    dims: list = []",
            "class Config: ValueError: mutable default",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, source, message):
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, source)
    assert message in str(caught.value)


def test_defaults_presets_and_given_values(config_class):
    assert config.make(config_class, {}).width == 512
    paper = config.make(config_class, {"preset": "paper"})
    assert (paper.width, paper.dims, paper.save) == (1024, (256, 512), True)
    assert config.make(config_class, {"preset": "paper", "width": 64}).width == 64


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("width", numpy.int64(64), 64),
        ("learning_rate", 1, 1.0),
        ("learning_rate", numpy.float32(0.5), 0.5),
        ("dims", [1, 2], (1, 2)),
        ("dims", (), ()),
        ("tile", [7, 1], (7, 1.0)),
        ("limit", None, None),
        ("limit", 5, 5),
        ("strategy", "native", "native"),
        ("save", True, True),
    ],
)
def test_a_good_value_is_kept_as_its_type(config_class, name, given, kept):
    value = getattr(config.make(config_class, {name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 1.5),
        ("width", True),
        ("width", "512"),
        ("width", None),
        ("learning_rate", "fast"),
        ("learning_rate", False),
        ("dims", 3),
        ("dims", "12"),
        ("dims", (1, 2.5)),
        ("tile", (1, 2.0, 3)),
        ("limit", "none"),
        ("strategy", "nativ"),
        ("save", 1),
        ("title", 3),
        ("preset", "huge"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(config_class, name, value):
    with pytest.raises(ParameterError) as caught:
        config.make(config_class, {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} = {value!r} is not ")
    assert "\n  width: int = 512  # Image width in pixels; a rank\n" in message
    assert "\n  strategy: one of 'native', 'local' = 'local'" in message


def test_an_unknown_name_is_refused_with_the_nearest_known_one(config_class):
    with pytest.raises(ParameterError, match="no parameter is called 'widht'; did you mean 'width'") as caught:
        config.make(config_class, {"widht": 3})
    assert "  dims: tuple[int, ...] = (32, 64)" in str(caught.value)
    assert "PRESETS" not in str(caught.value)


def test_the_programs_own_check(config_class):
    with pytest.raises(ParameterError, match="3 ranks cannot share width 512"):
        config.make(config_class, {}, world_size=3)
    assert config.make(config_class, {}, world_size=4).width == 512


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"width": 64, "learning_rate": 1e-7},
        {"width": -64, "learning_rate": float("inf")},
        {"strategy": "native", "save": True, "shuffle": False},
        {"preset": "paper"},
        {"preset": "paper", "width": 512, "dims": (32, 64), "save": False},  # back to what the class has
        {"dims": (9,)},
        {"dims": ()},
        {"dims": (-1, 2, -3)},
        {"tile": (1, -0.25)},
        {"limit": 3},
        {"title": "--a b=c'd\" é"},
        {"title": ""},
        {"title": "None"},
    ],
)
def test_the_command_line_is_read_back_as_the_same_config(config_class, given):
    made = config.make(config_class, given)
    argv = config.to_argv(made)
    assert config.parse_argv(config_class, argv) == made
    assert bool(argv) == bool(given)


@pytest.mark.parametrize("word", ["--learning-rate", "--learning_rate"])
def test_a_field_with_underscores_has_both_spellings(config_class, word):
    assert config.parse_argv(config_class, [word, "3"]).learning_rate == 3


@pytest.mark.parametrize("argv", [["--preset", "paper", "--width", "8"], ["--width", "8", "--preset=paper"]])
def test_a_preset_on_the_command_line(config_class, argv):
    parsed = config.parse_argv(config_class, argv)
    assert (parsed.width, parsed.dims) == (8, (256, 512))


def run_command_line(tmp_path, *argv):
    path = tmp_path / "shown.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom labkit.config import parse_argv\n@dataclass\nclass Config:\n"
        '    width: int = 512\n    """Image width in pixels."""\nprint(parse_argv(Config).width)\n'
    )
    return subprocess.run([sys.executable, str(path), *argv], capture_output=True, text=True, timeout=60)


def test_help_shows_the_docstrings_of_the_fields(tmp_path):
    answer = run_command_line(tmp_path, "--help")
    assert answer.returncode == 0
    assert "Image width in pixels." in answer.stdout


def test_a_command_line(tmp_path):
    assert run_command_line(tmp_path, "--width", "3").stdout == "3\n"
    answer = run_command_line(tmp_path, "--widht", "3")
    assert answer.returncode == 2
    assert "widht" in answer.stderr
