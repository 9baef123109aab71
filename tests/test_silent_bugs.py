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
    **{"tied": ["words"], "smoothing": ["head", "trunk"], "unwaited": ["first", "last"], "bfloat": ["last"]},
    "scale": [],
}
"""By room, the weights whose gradient is wrong."""
BUGS = [name for name in museum.ROOMS if WRONG[name]]
BY_FACTOR = {"experts": 2, "extra": 2, "clip": 1.05}
"""Rooms in which some gradient is wrong by a factor alone, on two ranks."""
DRIFTING = {"norm": "norm", "tokens": "embed", "router": "gate", "tied": "words"}
"""Rooms whose ranks drift apart, and in which weight."""
BY_TYPES = ["norm", "tokens", "router", "smoothing", "bfloat"]
"""Rooms that the types refuse."""


def visit_all():
    """What the ranks of each room report, by room."""
    return {name: visit.visit_room(name, steps=20) for name in museum.ROOMS}


@pytest.fixture(scope="module")
def visits(rank_pool):
    """What rank 0 of each room reports, with two ranks, by room."""
    first, _ = rank_pool.run(2, visit_all, (), 60)
    return first


def test_there_are_twelve_rooms_with_a_bug_of_at_most_60_lines_with_a_step_of_at_most_15():
    assert set(museum.ROOMS) == set(WRONG) and len(BUGS) == 12
    assert museum.thread("scale") == ("", ""), "nobody published that, since it is right"
    for name in museum.ROOMS:
        room = museum.open_room(name)
        assert len(inspect.getsource(room).splitlines()) <= 60, name
        assert len(inspect.getsource(room.step).splitlines()) <= 17, "head, docstring and 15 lines"
    for name in BUGS:
        where, when = museum.thread(name)
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", where) and re.fullmatch(r"\d+ [A-Z]\w+ 20\d\d", when)


@pytest.mark.parametrize("name", museum.ROOMS)
def test_parity_catches_the_bug_and_names_the_weights(name, visits):
    assert visits[name]["wrong"] == WRONG[name]
    rest = [error for weight, error in visits[name]["errors"].items() if weight not in WRONG[name]]
    assert all(error < 1e-5 for error in rest), "far from the limit"
    assert not WRONG[name] or max(visits[name]["errors"].values()) > 10 * museum.TOLERANCE


def test_a_rest_tells_a_missing_term_from_a_factor_and_the_spread_tells_who_drifts(visits):
    for name, visit_ in visits.items():
        if name == "unwaited":  # what a rank holds there hangs on its luck
            continue
        rests = {each: museum.unexplained(error, visit_["ratios"][each]) for each, error in visit_["errors"].items()}
        factors = [visit_["ratios"][each] for each in WRONG[name] if rests[each] < 1e-3]
        assert bool(factors) == (name in BY_FACTOR), name
        if factors:
            assert max(factors) == pytest.approx(BY_FACTOR[name], abs=0.05)
        drifting = [each for each, gap in visit_["spread"].items() if gap > museum.TOLERANCE]
        assert drifting == ([DRIFTING[name]] if name in DRIFTING else []), name
    assert visits["norm"]["spread"].keys() == {"norm", "head"}, "up and down are cut"


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
    steps = {name: mended_by_function(text, name) or mended_by_diff(text, name) for name in BUGS}
    assert sorted(name for name, step in steps.items() if not step) == []
    return steps


def mended_by_function(text, name):
    found = re.search(rf"^def mended_{name}\(.*?(?=^\S(?!ef))", text, flags=re.MULTILINE | re.DOTALL)
    return found[0].replace(f"def mended_{name}", "def step") if found else ""


def mended_by_diff(text, name):
    """The published step with the lines of the room's ```diff taken out and put in."""
    section = text.partition(f'museum.read("{name}")')[2]
    section = re.split(r"^(?:# ## |museum\.read)", section, flags=re.MULTILINE)[0]
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
        imports = "import time\n\nimport torch\nimport torch.distributed as dist\nfrom torch import Tensor\n"
        imports += "from torch.nn.functional import cross_entropy, gelu, one_hot, rms_norm\n"
        imports += "from launch.museum.parts import *\nfrom launch.museum.experts import choose\n\n\n"
        path.write_text(imports + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made[name] = module.step
    return made


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", BUGS)
def test_the_mended_step_passes_and_the_published_one_does_not(name, steps):
    verdict = checks.mended(steps[name], room=name)
    assert verdict.ok, verdict
    verdict = checks.mended(museum.open_room(name).step, room=name)
    assert verdict.state == "wrong" and verdict.hint == checks.HINTS[name], verdict
    assert any(f"the gradient of {weight} is" in verdict.detail for weight in WRONG[name])


@pytest.mark.usefixtures("ranks_at_hand")
def test_the_room_without_a_bug_passes_as_it_stands():
    assert checks.mended(museum.open_room("scale").step, room="scale").ok


def judged(name, comparison):
    """What visit_room makes of a room with a comparison of one's own."""
    return visit.visit_room(name, 1, comparison)


def nothing_is_off(got, whole, cut):
    return {name: (0.0, 1.0) for name in got}


def test_the_comparison_that_a_learner_gives_judges_the_room(rank_pool):
    for found in rank_pool.run(2, judged, ("norm", nothing_is_off), 60):
        assert found["wrong"] == [] and set(found["errors"].values()) == {0.0}


def test_the_types_refuse_five_rooms_and_accept_their_mends(steps):
    pytest.importorskip("spmd_types", reason="pip install spmd_types")
    said = typed.ask_all()
    assert [name for name, complaint in said.items() if complaint] == BY_TYPES
    assert said["norm"] == "the gradient of norm is P, not R"
    assert said["tied"] is None, "send has no rule yet"
    assert typed.ask_all(steps) == dict.fromkeys(BUGS, "") | {"tied": None}, "no false alarm"
    assert said["scale"] == "", "nor where nothing is wrong"


def test_the_types_take_ones_word_for_what_a_step_begins_with(steps):
    pytest.importorskip("spmd_types", reason="pip install spmd_types")
    assert typed.verdict("norm", steps["norm"], typed.declare("norm")) == "accepted"
    for wrong in ({"norm": "I"}, {"inputs": "I", "norm": "I", "head": "I"}, {"up": "I"}):
        assert "Invariant" in typed.verdict("norm", steps["norm"], wrong), wrong
    assert typed.declare("tokens") == {"inputs": "I", "embed": "I", "up": "V", "down": "V", "head": "I"}


def test_without_the_package_the_types_are_not_asked(monkeypatch, capsys):
    monkeypatch.setattr(typed.importlib.util, "find_spec", lambda name: None)
    assert typed.ask_all() == dict.fromkeys(museum.ROOMS)
    assert "pip install spmd_types" in capsys.readouterr().out


def test_a_table_shows_what_the_learner_committed_to():
    reported = {"errors": {"a": 0.5, "b": 1e-7, "c": 0.5}, "ratios": {"a": 0.5, "b": 1.0, "c": 0.7}}
    reported |= {"spread": {"a": 0.25, "b": 0.0}, "wrong": ["a", "c"]}
    table = museum.gradient_table(reported, {"a": 1.0, "b": None, "c": 0.0})
    assert table.loc["a"].tolist() == ["50.0%", "0.500", "0", "25.0%", "wrong", "wrong"]
    assert table.loc["b"].tolist() == ["0", "1.000", "0", "0", "right", "–"]
    assert table.loc["c"].tolist() == ["50.0%", "0.700", "40.0%", "–", "wrong", "right"]
    assert museum.table_rows(reported) == {"a": (0.5, 0.5, 0.25), "b": (1e-7, 1.0, 0.0), "c": (0.5, 0.7, None)}


def test_a_step_is_read_below_the_shapes_of_what_it_gets():
    shown = museum.read("norm").data.splitlines()
    assert shown[0] == "# inputs [960, 12], targets [960]; weights:"
    assert shown[1] == "# norm [12]; up [24, 12], cut along 0; down [12, 24], cut along 1; head [12, 12]"
    assert shown[2].startswith("def step(") and "first [12, 12], first stage only" in museum.read("tied").data


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
