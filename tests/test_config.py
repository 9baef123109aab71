"""A program's Config: read without running it, checked, carried as JSON and built again by the rank."""

import concurrent.futures
import gc
import math
import subprocess
import sys
import textwrap
from typing import Literal

import numpy
import pytest

import labkit
from labkit import config
from labkit.config import parse_argv
from labkit.errors import ParameterError
from labkit.launcher.run import resolve_params
from labkit.runs.folder import RunFolder, write_json
from labkit.session.payload import load_config

PROGRAM = '''
"""A program that must not be run to read its Config."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
import torch
import nowhere_to_be_found
from labkit import rank, errors
from labkit.config import Limits, NonNegativeInt, PositiveFloat, PositiveInt
from labkit.nowhere import more

SIZES = (32, 64)
Strategy = Literal["native", "local"]
torch.explode()
rank.run_main(print, Config)
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
    steps: PositiveInt = 5
    skip: tuple[NonNegativeInt, ...] = ()
    hidden: PositiveInt | None = None
    rate: PositiveFloat = 0.1
    drop: Annotated[float, Limits(at_least=0, below=1)] = 0.0
    """Share that is dropped."""

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
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    kind: str = later\nlater = ''",
            "program.py:4: class Config: NameError: name 'later' is not defined; it is read without running the "
            "program: it may use what the program's top level imports, assigns or defines above it",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: Missing = 1",
            "name 'Missing' is not defined",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int",
            "program.py:4: class Config: no default for width; every field needs one",
        ),
        (
            "import sys\nfrom dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = sys.exit(3)",
            "program.py:5: class Config: SystemExit: 3; fields need plain defaults",
        ),
        (
            "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    kind: str = ''\n"
            "    dims: list[int] = field(default_factory=list)",
            "program.py:5: class Config: field dims is list[int]; a field is int, float, bool, str, Literal, a tuple",
        ),
        (
            "from labkit.theory.tensor import rank_layers\nclass Config:\n    width: int = rank_layers(1)",
            "program.py:1: class Config: ModuleNotFoundError: No module named 'labkit.theory.tensor'",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = None",
            "program.py:4: class Config: the default of width, None, is not int: give one of its type, or change",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    dims: list = []",
            "program.py:2: class Config: ValueError: mutable default",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, source, message):
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, source)
    assert message in str(caught.value)


def test_defaults_presets_and_given_values(config_class):
    assert config.build_config(config_class, {}).width == 512
    paper = config.build_config(config_class, {"preset": "paper"})
    assert (paper.width, paper.dims, paper.save) == (1024, (256, 512), True)
    assert config.build_config(config_class, {"preset": "paper", "width": 64}).width == 64


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
        ("save", numpy.bool_(True), True),
        ("title", numpy.str_("wide"), "wide"),
        ("dims", numpy.array([1, 2]), (1, 2)),
        ("dims", [numpy.int64(1), 2], (1, 2)),
        ("tile", (numpy.int32(7), numpy.float64(0.25)), (7, 0.25)),
        ("width", numpy.array(3), 3),
        ("limit", numpy.int64(5), 5),
        ("steps", 1, 1),
        ("skip", (0, 1), (0, 1)),
        ("hidden", 1, 1),
        ("drop", 0, 0.0),
        ("drop", 0.99, 0.99),
    ],
)
def test_a_good_value_is_kept_as_its_type(config_class, name, given, kept):
    value = getattr(config.build_config(config_class, {name: given}), name)
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
        ("width", 2**63),
        ("width", numpy.float64(2.0)),
        ("dims", numpy.array([1.0, 2.0])),
        ("dims", numpy.array([[1], [2]])),
        ("steps", 0),
        ("skip", (0, -1)),
        ("hidden", 0),
        ("rate", 0),
        ("rate", math.nan),
        ("rate", math.inf),
        ("drop", 1.0),
        ("drop", -0.5),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(config_class, name, value):
    with pytest.raises(ParameterError) as caught:
        config.build_config(config_class, {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} = {value!r} is not ")
    assert "\n  width: int = 512  # Image width in pixels; a rank\n" in message
    assert "\n  strategy: one of 'native', 'local' = 'local'" in message
    assert "\n  steps: int ≥ 1 = 5\n  skip: tuple[int ≥ 0, ...] = ()\n  hidden: int ≥ 1 | None = None\n" in message
    assert message.endswith("\n  drop: float ≥ 0 and < 1 = 0.0  # Share that is dropped.")


def test_an_unknown_name_is_refused_with_the_nearest_known_one(config_class):
    with pytest.raises(ParameterError, match="no parameter is called 'widht'; did you mean 'width'") as caught:
        config.build_config(config_class, {"widht": 3})
    assert "  dims: tuple[int, ...] = (32, 64)" in str(caught.value)
    assert "PRESETS" not in str(caught.value)


@pytest.fixture
def extended(tmp_path):
    """The Config of a program that another one extends, and of the other."""
    source = """
    from dataclasses import dataclass
    @dataclass
    class Config:
        width: int = 4
        'Pixels.'
        depth: int = 1
        def validate(self, world_size):
            if self.width > 8:
                raise ValueError("too wide")
    """
    more = """
    from dataclasses import dataclass
    import torch
    from launch.plain import Config as PlainConfig, main
    @dataclass
    class Config(PlainConfig):
        depth: int = 2
        hybrid: int = 0
        'Groups.'
        def validate(self, world_size):
            super().validate(world_size)
    """
    for name, text in {"plain": source, "more": more}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    return [config.read_config(tmp_path / f"{name}.py") for name in ("plain", "more")]


def test_a_config_can_extend_that_of_a_program_beside_it(extended):
    _, more = extended
    assert vars(config.build_config(more, {"width": 5, "hybrid": 2}, 2)) == {"width": 5, "depth": 2, "hybrid": 2}
    shown = config.describe_fields(more)
    assert "width: int = 4  # Pixels." in shown and "hybrid: int = 0  # Groups." in shown
    with pytest.raises(ParameterError, match="too wide"):
        config.build_config(more, {"width": 9}, 2)


def test_a_parameter_of_a_program_beside_this_one_is_refused_with_the_name_of_that(extended):
    plain, more = extended
    message = r"no parameter is called 'hybrid'\. It is a parameter of more\. Allowed:\n  width"
    with pytest.raises(ParameterError, match=message):
        config.build_config(plain, {"hybrid": 2})
    with pytest.raises(SystemExit, match="2"):
        parse_argv(plain, ["--hybrid", "2"])
    assert parse_argv(more, ["--hybrid", "2"]).hybrid == 2


def test_the_programs_own_check(config_class):
    with pytest.raises(ParameterError, match="3 ranks cannot share width 512"):
        config.build_config(config_class, {}, world_size=3)
    assert config.build_config(config_class, {}, world_size=4).width == 512


def test_a_value_too_long_to_read_is_cut(config_class):
    with pytest.raises(ParameterError) as caught:
        config.build_config(config_class, {"width": "w" * 10**6})
    assert len(str(caught.value).splitlines()[0]) < 250


def test_what_is_not_at_its_default_keeps_its_limits_on_a_rank(config_class):
    with pytest.raises(ParameterError, match=r"^steps = 0 is not int ≥ 1$"):
        config.validate(config_class(steps=0), world_size=1)


@pytest.mark.parametrize(
    ("value", "kind", "limits", "message"),
    [
        (1, int, {"at_least": 2}, "N = 1, but must be int ≥ 2: two are a pair. Change it in the cell of parameters."),
        (200, int, {"at_least": 1, "multiple_of": 32}, "N = 200, but must be int ≥ 1 and a multiple of 32: "),
        (9, int, {"at_least": 2, "at_most": 8}, "N = 9, but must be int ≥ 2 and ≤ 8: "),
        (64, int, {"at_least": 70, "multiple_of": 32}, "N = 64, but must be int ≥ 70 and a multiple of 32: "),
        (0, int, {"at_least": 2, "multiple_of": 2}, "N = 0, but must be int ≥ 2 and "),
        (-2, int, {"at_least": 2, "multiple_of": 2}, "N = -2, but must be int ≥ 2 and "),
        (0.0, float, {"above": 0}, "N = 0.0, but must be float > 0: "),
        (math.nan, float, {"above": 0}, "N = nan, but must be float > 0: "),
        (2.0, int, {"at_least": 2}, "N = 2.0, but must be int ≥ 2: "),
        ("2", int, {"at_least": 2}, "N = '2', but must be int ≥ 2: "),
        ("2", float, {"above": 0}, "N = '2', but must be float > 0: "),
        (True, int, {"at_least": 1}, "N = True, but must be int ≥ 1: "),
        (None, int, {"at_least": 1}, "N = None, but must be int ≥ 1: "),
        (3, Literal[2, 4], {}, "N = 3, but must be one of 2, 4: two are a pair. "),
    ],
)
def test_a_notebooks_parameter_outside_its_limits_is_refused_with_reason_and_fix(value, kind, limits, message):
    with pytest.raises(ParameterError) as caught:
        config.require("N", value, kind, because="two are a pair", **limits)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "kind", "limits"),
    [
        (2, int, {"at_least": 2}),
        (96, int, {"at_least": 70, "multiple_of": 32}),
        (1, float, {"above": 0}),
        (0.001, float, {"above": 0}),
    ],
)
def test_a_notebooks_parameter_within_its_limits_goes_on(value, kind, limits):
    config.require("N", value, kind, because="two are a pair", **limits)


HOLD = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 4\n"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "    def validate(self, world_size):\n        return self.width / (world_size - 2)\n",
            "program.py:6: Config.validate: ZeroDivisionError: division by zero; to refuse a value, raise ValueError",
        ),
        (
            "    def validate(self, world_size):\n        torch.zeros(1)\n",
            "program.py:6: Config.validate: NameError: name 'torch' is not defined; it is read without running",
        ),
        (
            "    def validate(self, world_size):\n        raise SystemExit(3)\n",
            "program.py:6: Config.validate: SystemExit: 3",
        ),
        ("    def validate(self):\n        pass\n", "program.py:5: Config.validate: TypeError: "),
        (
            "    def __post_init__(self):\n        self.width / 0\n",
            "program.py:6: Config.__post_init__: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_mistake_in_a_method_is_told_with_its_line(tmp_path, method, message):
    config_class = read(tmp_path, HOLD + method)
    with pytest.raises(ParameterError) as caught:
        config.build_config(config_class, {}, world_size=2)
    assert message in str(caught.value)


def test_validate_may_use_every_formula_and_what_it_imports_itself(tmp_path):
    program = f"""
from labkit.theory.two_dim import rank_layers
import labkit.theory.collectives
from labkit.models import catalog, mlp
{HOLD}
    def validate(self, world_size):
        import torch
        fit = labkit.theory.collectives.AlphaBeta
        raise ValueError(f"{{rank_layers.__name__}} {{fit.__name__}} {{len(catalog.MODELS)}}")
"""
    with pytest.raises(ParameterError, match=r"^rank_layers AlphaBeta 12$"):
        config.build_config(read(tmp_path, program), {}, world_size=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x01\x02\xff" * 50, "not valid Python"),
        (b"import os\0\n", "not valid Python: source code string cannot contain null bytes"),
        (b"name = '\xe9'\n", "not valid Python: "),
        (b"# coding: klingon\n", "not valid Python: "),
        (b"(" * 5000, "not valid Python: "),
        (b"-" * 100000 + b"1", "not valid Python: "),
    ],
)
def test_a_file_that_is_not_python_is_refused(tmp_path, content, message):
    path = tmp_path / "program.py"
    path.write_bytes(content)
    with pytest.raises(ParameterError) as caught:
        config.read_config(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ParameterError, match=r"cannot be read \(Is a directory\): give a file of Python"):
        config.read_config(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + HOLD.encode() + b"print('caf\xc3\xa9')\n",
        b"# -*- coding: latin-1 -*-\n" + HOLD.encode() + b"print('caf\xe9')\n",
        HOLD.replace("\n", "\r\n").encode() + b"print('caf\xc3\xa9')\r\n",
    ],
    ids=["BOM", "latin-1", "CRLF"],
)
def test_what_python_runs_is_read_and_run(tmp_path, content):
    path = tmp_path / "program.py"
    path.write_bytes(content)
    assert config.read_config(path)().width == 4
    assert labkit.run(path, nproc=1).ranks[0].log() == "café\n"


@pytest.fixture
def frequent_switches():
    """Threads take turns often, and inside the parser too: collecting garbage there runs Python."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(run_python := lambda *_: sum(range(30)))
    yield
    gc.callbacks.remove(run_python)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def test_threads_read_at_the_same_time(program, frequent_switches):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        classes = list(pool.map(config.read_config, [program] * 200))
    assert {config_class().width for config_class in classes} == {512}
    assert not [name for name in sys.modules if "config of" in name]


def test_what_the_config_names_is_run_and_nothing_else_of_the_program(tmp_path):
    config_class = read(
        tmp_path,
        """
        from dataclasses import dataclass, fields
        from nowhere import nothing
        from math import inf, pi as circle
        raise SystemExit("the program was run")
        width = 1 / 0
        steps = 1 / 0
        def twice(value):
            return 2 * value
        HALF = 4
        WHOLE = twice(HALF)

        @dataclass
        class Config:
            width: int = WHOLE
            angle: float = circle

            def validate(self, world_size):
                steps = len(fields(Config))
                raise ValueError(f"{steps} fields, {twice(self.width)}")
        """,
    )
    assert config_class().width == 8 and config_class().angle == math.pi
    with pytest.raises(ParameterError, match=r"^2 fields, 16$"):
        config.build_config(config_class, {}, world_size=1)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The folder of a run in whose rank this process is; its program has no command line."""
    monkeypatch.setenv("LABKIT_RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program"])
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"width": -64, "learning_rate": 1e-7},
        {"strategy": "native", "save": True, "shuffle": False},
        {"preset": "paper"},
        {"preset": "paper", "width": 512, "dims": (32, 64), "save": False},  # back to what the class has
        {"dims": ()},
        {"dims": (-1, 2, -3)},
        {"tile": (1, -0.25)},
        {"limit": 3},
        {"title": "--a b=c'd\" é\0\ud800\n"},
        {"title": "x" * 200_000},
        {"title": ""},
        {"title": "None"},
    ],
    ids=str,
)
def test_a_rank_builds_the_config_of_its_run_again(config_class, run_folder, given):
    made = config.build_config(config_class, given)
    write_json(run_folder.run_json, {"params": config.config_params(made)})
    assert load_config(config_class) == made


def test_a_command_line_comes_before_the_parameters_of_the_run(config_class, run_folder, monkeypatch):
    write_json(run_folder.run_json, {"params": {"width": 64}})
    monkeypatch.setattr(sys, "argv", ["another", "--width", "8"])
    assert load_config(config_class).width == 8


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_hold_is_refused_before_a_start(program, number):
    with pytest.raises(ParameterError) as caught:
        labkit.run(program, nproc=1, learning_rate=number)
    rule = "parameters travel as JSON, which cannot hold it; give a finite number"
    assert f"learning_rate = {number}: {rule}" in str(caught.value)


def test_a_run_knows_all_parameters_and_those_that_were_given(program):
    every, given = resolve_params(program, {"preset": "paper", "dims": [1, 2]}, 1)
    assert every["width"] == 1024 and every["steps"] == 5 and every["dims"] == (1, 2)
    assert given == {"preset": "paper", "dims": (1, 2)}


def test_parameters_of_a_program_that_never_reads_them_are_refused(tmp_path):
    path = tmp_path / "deaf.py"
    path.write_text(HOLD + "print(Config())\n")
    with pytest.raises(ParameterError) as caught:
        resolve_params(path, {"width": 8}, 1)
    message = "deaf never reads its Config, so width would change nothing: call rank.run_main(main, Config)"
    assert str(caught.value).startswith(message)
    assert resolve_params(path, {}, 1) == ({"width": 4}, {})


@pytest.mark.parametrize("word", ["--learning-rate", "--learning_rate"])
def test_a_field_with_underscores_has_both_spellings(config_class, word):
    assert parse_argv(config_class, [word, "3"]).learning_rate == 3


@pytest.mark.parametrize("argv", [["--preset", "paper", "--width", "8"], ["--width", "8", "--preset=paper"]])
def test_a_preset_on_the_command_line(config_class, argv):
    parsed = parse_argv(config_class, argv)
    assert (parsed.width, parsed.dims) == (8, (256, 512))


def run_command_line(tmp_path, *argv):
    path = tmp_path / "shown.py"
    path.write_text(
        "import sys\nfrom dataclasses import dataclass\n"
        "from labkit.config import PositiveInt, parse_argv\n\n"
        "@dataclass\nclass Config:\n"
        '    width: PositiveInt = 512\n    """Image width in pixels."""\n'
        "    rows: tuple[int, ...] = ()\nprint(parse_argv(Config, sys.argv[1:]).width)\n"
    )
    return subprocess.run([sys.executable, str(path), *argv], capture_output=True, text=True, timeout=60)


def test_help_shows_the_docstrings_of_the_fields(tmp_path):
    answer = run_command_line(tmp_path, "--help")
    assert answer.returncode == 0
    assert "Image width in pixels. (int ≥ 1) (default: 512)" in answer.stdout
    assert "tuple[" not in answer.stdout, "tyro's own way to write a type is enough without limits"


def test_a_command_line(tmp_path):
    assert run_command_line(tmp_path, "--width", "3").stdout == "3\n"
    answer = run_command_line(tmp_path, "--widht", "3")
    assert answer.returncode == 2
    assert "widht" in answer.stderr
