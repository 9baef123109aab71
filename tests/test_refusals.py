"""Values that mean nothing are refused by every program: before a launch, and on a rank under bare torchrun."""

import importlib
import re
import sys
from dataclasses import dataclass, fields

import numpy
import pytest
from fixture_time import within

import labkit
from labkit import config, rank
from labkit.launcher import process
from labkit.launcher.run import find_program
from labkit.models import photo

PROGRAMS = (
    *("all_reduce", "allgather_extensions", "convnext_spatial", "ddp_compile", "decoder"),
    *("fsdp_matrix", "fsdp_wrap", "simple_fsdp", "two_dim"),
)
TRAINING = PROGRAMS[1:]
WITHOUT_DIM = ("convnext_spatial", "decoder")
NAN, INFINITY = float("nan"), float("inf")

REFUSED = [
    *[(program, {"steps": steps}, f"steps = {steps} is not int ≥ 1") for program in TRAINING for steps in (0, -3)],
    *[(program, {"steps": 0, "check": "parity"}, "steps = 0 is not int ≥ 1") for program in TRAINING],
    *[(program, {"batch": batch}, f"batch = {batch} is not int ≥ 1") for program in TRAINING for batch in (0, -2)],
    *[(program, {"dim": 0}, "dim = 0 is not int ≥ 1") for program in TRAINING if program not in WITHOUT_DIM],
    (
        "allgather_extensions",
        {"steps": 1, "check": "meta"},
        "steps 1: check meta holds the last loss against the first",
    ),
    ("all_reduce", {"repeats": 0}, "repeats = 0 is not int ≥ 1"),
    ("all_reduce", {"total_bytes": 0}, "total_bytes = 0 is not int ≥ 1"),
    ("all_reduce", {"pieces": (1, 0)}, "pieces = (1, 0) is not tuple[int ≥ 1, ...]"),
    ("all_reduce", {"message_bytes": (-4, 4)}, "message_bytes = (-4, 4) is not tuple[int ≥ 1, ...]"),
    ("convnext_spatial", {"num_classes": 0}, "num_classes = 0 is not int ≥ 2"),
    ("convnext_spatial", {"num_classes": 1}, "num_classes = 1 is not int ≥ 2"),
    ("convnext_spatial", {"num_classes": 9, "data": "photo"}, "num_classes 9 cannot label the photo's ten regions"),
    ("convnext_spatial", {"seed": -1}, "seed = -1 is not int ≥ 0"),
    ("convnext_spatial", {"learning_rate": -1}, "learning_rate = -1 is not float > 0"),
    ("convnext_spatial", {"learning_rate": NAN}, "learning_rate = nan is not float > 0"),
    ("convnext_spatial", {"learning_rate": INFINITY}, "learning_rate = inf is not float > 0"),
    ("convnext_spatial", {"drop_path_rate": 1.0}, "drop_path_rate = 1.0 is not float ≥ 0 and < 1"),
    ("convnext_spatial", {"layer_scale_init_value": -1e-6}, "layer_scale_init_value = -1e-06 is not float ≥ 0"),
    ("convnext_spatial", {"height": 0}, "height = 0 is not int ≥ 1"),
    ("convnext_spatial", {"width": -8}, "width = -8 is not int ≥ 1"),
    ("convnext_spatial", {"depths": (1, 0)}, "depths = (1, 0) is not tuple[int ≥ 1, ...]"),
    ("convnext_spatial", {"dims": (0, 64)}, "dims = (0, 64) is not tuple[int ≥ 1, ...]"),
    ("convnext_spatial", {"mesh": "²"}, "mesh '²' is neither one number of ranks"),
    ("convnext_spatial", {"mesh": "0x2"}, "mesh '0x2' is neither one number of ranks"),
    ("ddp_compile", {"bucket_mb": 0}, "bucket_mb = 0 is not float > 0"),
    ("ddp_compile", {"bucket_mb": NAN}, "bucket_mb = nan is not float > 0"),
    ("decoder", {"layers": 0}, "layers = 0 is not int ≥ 1 | None"),
    ("decoder", {"sequence": -1}, "sequence = -1 is not int ≥ 1 | None"),
    ("decoder", {"tp": 0}, "tp = 0 is not int ≥ 1"),
    ("decoder", {"hybrid": 0}, "hybrid = 0 is not int ≥ 1 | None"),
    ("fsdp_wrap", {"delay_ms": -1}, "delay_ms = -1 is not float ≥ 0"),
    ("fsdp_wrap", {"delay_ms": INFINITY}, "delay_ms = inf is not float ≥ 0"),
    ("fsdp_wrap", {"hidden": 0}, "hidden = 0 is not int ≥ 1 | None"),
    ("fsdp_wrap", {"narrow": -1}, "narrow = -1 is not int ≥ 1 | None"),
    ("fsdp_matrix", {"skip": (-1,)}, "skip = (-1,) is not tuple[int ≥ 0, ...]"),
    (
        "fsdp_matrix",
        {"skip": (99,)},
        "skip (99,) counts blocks that are not there: model toy has 9 blocks, from 0 to 8",
    ),
    ("fsdp_matrix", {"freeze": (3,), "model": "mlp_stack"}, "freeze (3,) counts blocks that are not there: model mlp_"),
    ("fsdp_matrix", {"freeze": (11,), "blocks": ("ReLU",)}, "model toy has 11 blocks, from 0 to 10"),
    ("fsdp_wrap", {"fsdp": "yours", "precision": "bf16"}, "precision is not for fsdp yours, which shards units"),
    ("fsdp_wrap", {"fsdp": "yours", "model": "moe"}, "model moe is not for fsdp yours"),
    ("fsdp_wrap", {"fsdp": "yours", "wrap": "none"}, "wrap none is not for fsdp yours"),
    ("fsdp_wrap", {"wrap": "limit"}, "wrap limit needs a limit, and no other has one"),
    ("fsdp_wrap", {"limit": 1000}, "wrap limit needs a limit, and no other has one"),
    ("fsdp_wrap", {"wrap": "limit", "limit": 1000, "prefetch": True}, "wrap limit trains with fsdp 2 and no other"),
    ("fsdp_wrap", {"wrap": "limit", "limit": 1000, "fsdp": 1}, "no other options, not fsdp 1"),
    ("fsdp_matrix", {"use_orig_params": False}, "use_orig_params is an option of FSDP1"),
    ("fsdp_matrix", {"fsdp": "yours"}, "fsdp = 'yours' is not one of 1, 2"),
    ("fsdp_wrap", {"forget": 1, "wrap": "layer"}, "forget 1 leaves out blocks, but wrap is 'layer': use wrap block"),
    ("two_dim", {"tp": 0}, "tp = 0 is not int ≥ 1"),
    ("two_dim", {"tp": -2}, "tp = -2 is not int ≥ 1"),
    ("two_dim", {"dim": 2**64}, f"dim = {2**64} is not int ≥ 1"),
    ("two_dim", {"dim": 10**5000}, "dim = <int, Exceeds the limit"),
    ("two_dim", {"dim": numpy.array([64])}, "dim = array([64]) is not int ≥ 1"),
    ("fsdp_matrix", {"skip": numpy.array([1.5])}, "skip = array([1.5]) is not tuple[int ≥ 0, ...]"),
    ("fsdp_matrix", {"skip": numpy.array([[1], [2]])}, "is not tuple[int ≥ 0, ...]. Allowed:"),
]


@pytest.mark.parametrize(("program", "parameters", "message"), REFUSED)
def test_what_means_nothing_is_refused_before_a_launch(program, parameters, message, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(process, "start_torchrun", lambda *arguments: pytest.fail("a run was started"))
    with within(1), pytest.raises(labkit.ParameterError) as caught:
        labkit.run(program, nproc=2, **parameters)
    assert str(caught.value).startswith(f"{program}: ") and message in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("all_reduce", "--pieces 4 0", "pieces = (4, 0) is not tuple[int ≥ 1, ...]"),
        ("allgather_extensions", "--batch 0 --check parity", "batch = 0 is not int ≥ 1"),
        ("convnext_spatial", "--learning-rate nan", "learning_rate = nan is not float > 0"),
        ("ddp_compile", "--steps 0", "steps = 0 is not int ≥ 1"),
        ("decoder", "--preset paper --tp 0", "tp = 0 is not int ≥ 1"),
        ("fsdp_wrap", "--steps -3 --check parity", "steps = -3 is not int ≥ 1"),
        (
            "fsdp_matrix",
            "--skip 0 99",
            "skip (0, 99) counts blocks that are not there: model toy has 9 blocks, from 0 to 8",
        ),
        ("two_dim", "--preset paper --dim 0", "dim = 0 is not int ≥ 1"),
    ],
)
def test_a_rank_under_bare_torchrun_refuses_the_same_in_one_line(program, words, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as caught:
        rank.run_main(
            lambda made: pytest.fail(f"started with {made}"), importlib.import_module(f"launch.{program}").Config
        )
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_a_rank_under_bare_torchrun_tells_what_post_init_refuses_in_one_line(monkeypatch, capsys):
    @dataclass
    class Config:
        width: int = 4

        def __post_init__(self):
            if self.width > 8:
                raise ValueError(f"width {self.width} is more than 8")

    monkeypatch.setattr(sys, "argv", ["program", "--width", "9"])
    with pytest.raises(SystemExit) as caught:
        rank.run_main(lambda made: pytest.fail(f"started with {made}"), Config)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "width 9 is more than 8\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_of_a_program_has_limits(program):
    config_class = config.read_config(find_program(program)[0])
    types = [line.partition(" = ")[0] for line in config.describe_fields(config_class).splitlines()]
    assert [each for each in types if re.search(r": .*\b(int|float)\b(?! [≥>])", each)] == []


def test_lab_2s_program_stays_short_and_names_the_program_with_the_other_options():
    plain, matrix = (config.read_config(find_program(name)[0]) for name in ("fsdp_wrap", "fsdp_matrix"))
    known, more = ({field.name for field in fields(each)} for each in (plain, matrix))
    assert len(known) <= 19 and known < more, "a new option of FSDP belongs to fsdp_matrix"
    for name in more - known:
        with pytest.raises(labkit.ParameterError, match=rf"called '{name}'.* It is .* of fsdp_matrix[ .]"):
            config.build_config(plain, {name: 1})


def test_the_photo_takes_as_many_classes_as_its_config_says():
    assert photo.REGION_ROWS * photo.REGION_COLUMNS == 10
