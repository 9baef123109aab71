"""Lab 7b's rooms: parity catches each bug, the loss does not show it, and it is the mend that mends it."""

import importlib.util
import inspect
import re
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.errors import ParameterError
from labkit_course.checks import silent_bugs as checks
from launch import museum
from launch.museum import parts, typed, visit

SOURCE = Path(__file__).resolve().parents[1] / "notebooks" / "src" / "07b_silent_bugs.py"
WRONG = {
    **{"norm": ["norm"], "counts": ["first", "last"], "experts": ["experts"], "tokens": ["embed"]},
    **{"router": ["gate"], "gathered": ["text"], "extra": ["extra", "trunk"], "clip": ["down", "head", "up"]},
    **{"tied": ["words"], "accumulate": ["first", "last"], "unwaited": ["first", "last"], "bfloat": ["last"]},
}
"""By room, the weights whose gradient is wrong."""
BY_TYPES = ["norm", "tokens", "router", "clip", "accumulate", "bfloat"]
"""Rooms that the types refuse."""


def visit_all():
    """What the ranks of each room report, by room."""
    return {name: visit.visit_room(name, steps=20) for name in museum.ROOMS}


@pytest.fixture(scope="module")
def visits(rank_pool):
    """What rank 0 of each room reports, with two ranks, by room."""
    first, _ = rank_pool.run(2, visit_all, (), 60)
    return first


def test_there_are_twelve_rooms_of_at_most_60_lines_with_a_step_of_at_most_15():
    assert len(set(museum.ROOMS)) == 12 == len(WRONG)
    for name in museum.ROOMS:
        room = museum.open_room(name)
        assert len(inspect.getsource(room).splitlines()) <= 60, name
        assert len(inspect.getsource(room.step).splitlines()) <= 17, "head, docstring and 15 lines"
        where, when = museum.thread(name)
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", where) and re.fullmatch(r"\d+ [A-Z]\w+ 20\d\d", when)


@pytest.mark.parametrize("name", museum.ROOMS)
def test_parity_catches_the_bug_and_names_the_weights(name, visits):
    assert visits[name]["wrong"] == WRONG[name]
    rest = [error for weight, error in visits[name]["errors"].items() if weight not in WRONG[name]]
    assert all(error < 1e-5 for error in rest), "far from the limit"
    assert max(visits[name]["errors"].values()) > 10 * museum.TOLERANCE


@pytest.mark.parametrize("name", museum.ROOMS)
def test_the_loss_is_within_two_percent_for_20_steps_and_falls(name, visits):
    logged, right = visits[name]["logged"], visits[name]["right"]
    assert len(logged) == len(right) == 20
    assert max(abs(here / there - 1) for here, there in zip(logged, right, strict=True)) < 0.02
    assert logged[-1] < 11 / 12 * logged[0] and right[-1] < 11 / 12 * right[0]


@pytest.mark.parametrize("name", museum.ROOMS)
def test_a_room_takes_less_than_5_s(name, visits):
    assert 0 < visits[name]["seconds"] < 5


def test_a_launch_of_a_room_is_a_failed_parity_check_and_takes_less_than_5_s_more():
    began = time.perf_counter()
    result = labkit.check("silent_bugs", nproc=2, device="cpu", room="tokens")
    assert not result.ok and result.verdict["compared"] == 4 and result.verdict["max_rel_error"] > 0.1
    assert time.perf_counter() - began < 60, "generous: the machine may be busy, and torch is imported first"


@pytest.mark.parametrize(("name", "ranks"), [("tied", 3), ("norm", 5), ("norm", 1)])
def test_other_numbers_of_ranks_are_refused(name, ranks):
    with pytest.raises(ParameterError, match="ranks"):
        labkit.run("silent_bugs", nproc=ranks, device="cpu", room=name)


def mended_steps():
    """The mended step of each room, as text, from the notebook: a function, or a diff of the published one."""
    text = SOURCE.read_text()
    steps = {name: mended_by_function(text, name) or mended_by_diff(text, name) for name in museum.ROOMS}
    assert sorted(name for name, step in steps.items() if not step) == []
    return steps


def mended_by_function(text, name):
    found = re.search(rf"^def mended_{name}\(.*?(?=^\S(?!ef))", text, flags=re.MULTILINE | re.DOTALL)
    return found[0].replace(f"def mended_{name}", "def step") if found else ""


def mended_by_diff(text, name):
    """The published step with the lines of the room's ```diff taken out and put in."""
    section = text.partition(f'museum.read("{name}")')[2].partition("\n# ## ")[0]
    step = inspect.getsource(museum.open_room(name).step).splitlines()
    (diff,) = re.findall(r"^# ```diff\n(.*?)^# ```", section, flags=re.MULTILINE | re.DOTALL)
    place = 0
    for line in (f"{each[2]}    {each[4:]}" for each in diff.splitlines()):
        if line[0] == "+":
            step.insert(place, line[1:])
        else:
            place = step.index(line[1:], place if line[0] == "-" else 0)
            if line[0] == "-":
                step.pop(place)
                continue
        place += 1
    return "\n".join(step) + "\n"


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The mended steps as functions of a module."""
    made = {}
    for name, text in mended_steps().items():
        path = tmp_path_factory.mktemp(name) / f"mended_{name}.py"
        imports = "import torch\nimport torch.distributed as dist\nfrom torch import Tensor\n"
        imports += "from torch.nn.functional import cross_entropy, gelu, one_hot, rms_norm\n"
        imports += "from launch.museum.parts import *\nfrom launch.museum.experts import choose\n\n\n"
        path.write_text(imports + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made[name] = module.step
    return made


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", museum.ROOMS)
def test_the_mended_step_passes_and_the_published_one_does_not(name, steps):
    verdict = checks.mended(steps[name], room=name)
    assert verdict.ok, verdict
    verdict = checks.mended(museum.open_room(name).step, room=name)
    assert verdict.state == "wrong" and verdict.hint == checks.HINTS[name], verdict
    assert any(f"the gradient of {weight} is" in verdict.detail for weight in WRONG[name])


def test_the_types_refuse_six_rooms_and_accept_their_mends(steps):
    pytest.importorskip("spmd_types", reason="pip install spmd_types")
    said = typed.ask_all()
    assert [name for name, complaint in said.items() if complaint] == BY_TYPES
    assert said["norm"] == "the gradient of norm is P, not R"
    assert said["tied"] is None, "send has no rule yet"
    assert typed.ask_all(steps) == dict.fromkeys(museum.ROOMS, "") | {"tied": None}, "no false alarm"


def test_without_the_package_the_types_are_not_asked(monkeypatch, capsys):
    monkeypatch.setattr(typed.importlib.util, "find_spec", lambda name: None)
    assert typed.ask_all() == dict.fromkeys(museum.ROOMS)
    assert "pip install spmd_types" in capsys.readouterr().out


def test_a_table_shows_what_the_learner_committed_to():
    reported = {"errors": {"a": 0.5, "b": 1e-7}, "ratios": {"a": 0.5, "b": 1.0}, "wrong": ["a"]}
    table = museum.gradient_table(reported, {"a": 1.0, "b": None})
    assert table.loc["a"].tolist() == ["0.50", "50.0%", "wrong", "wrong"]
    assert table.loc["b"].tolist() == ["1.00", "rounding", "right", "–"]


def body(name, *shape):
    """A given function's result and gradient on a rank, for a loss that weighs ranks and places differently."""
    own = (torch.arange(float(torch.Size(shape).numel())).view(shape) + dist.get_rank()).requires_grad_()
    result = getattr(parts, name)(own)
    weight = torch.arange(float(result.numel())).view_as(result) * (1 + dist.get_rank())
    (result * weight).sum().backward()
    return result.tolist(), own.grad.tolist()


@pytest.mark.parametrize("count", [2, 3])
def test_the_given_collectives_have_the_values_and_gradients_of_the_table(count, ranks):
    gathered = ranks(count)(body, "gather_from_ranks", 2)
    whole = [float(place + rank) for rank in range(count) for place in range(2)]
    factor = sum(range(1, count + 1))
    for rank, (values, gradient) in enumerate(gathered):
        assert values == whole
        assert gradient == [factor * (2.0 * rank), factor * (2.0 * rank + 1)]
    shared = ranks(count)(body, "sum_and_share", 2 * count)
    for rank, (values, gradient) in enumerate(shared):
        assert values == [float(count * place + sum(range(count))) for place in (2 * rank, 2 * rank + 1)]
        assert gradient == [float(place * (1 + each)) for each in range(count) for place in range(2)]


def test_one_device_moves_every_weight():
    for name in museum.ROOMS:
        right, loss = visit.right_gradients(museum.open_room(name))
        assert loss > 0 and all(gradient.norm() > 1e-3 for gradient in right.values()), name
