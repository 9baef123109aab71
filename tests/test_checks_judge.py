"""labkit_course.checks.judge: whatever an answer is and does, its check ends in a verdict."""

import errno
import functools
import itertools
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import IPython
import numpy
import pytest
import torch
from IPython.core.autocall import ExitAutocall
from matplotlib.colors import to_rgb

from labkit.runs.result import RunResult
from labkit_course.checks import (
    collectives,
    collectives_at_work,
    ddp,
    ddp_at_work,
    extensions_at_work,
    failures,
    fsdp,
    fsdp_at_work,
    hosts,
    judge,
    simulation,
    spatial,
    spatial_at_work,
    step_time,
    two_dim,
    two_dim_at_work,
)

IMPORTS = "import sys\nimport torch\n\n\n"
COUNTED = [{"kind": "comm", "name": "tp/all_reduce", "rank": 0, "step": 3, "count": 5, "bytes": 20}]
IN_THE_NOTEBOOK = [
    (collectives.step_seconds, ()),
    (collectives_at_work.fitted, ()),
    (collectives_at_work.balancing_tokens, ()),
    (spatial_at_work.local_columns, ()),
    (spatial.extra_columns, ()),
    (spatial.strips_seconds, ()),
    (spatial_at_work.activation_bytes, ()),
    (fsdp.fewest_ranks, ()),
    (fsdp_at_work.peak_bytes, ()),
    (fsdp_at_work.gradients_agree, ()),
    (extensions_at_work.new_two, ()),
    (extensions_at_work.dispatch, ()),
    (extensions_at_work.pre_all_gather, ()),
    (extensions_at_work.halves, ()),
    (ddp.bucket_plan, ()),
    (ddp.arrivals, ()),
    (ddp_at_work.early_uses, ()),
    (ddp_at_work.smallest_bucket, ()),
    (two_dim.parts, ()),
    (two_dim.message_share, ()),
    (two_dim_at_work.collectives, "counted"),
    (failures.culprit, ()),
    (failures.where_they_part, ()),
    (failures.gradient_gaps, ()),
    (failures.diagnoses, ()),
    (hosts.launch_line, ()),
    (hosts.mend_script, ()),
    (simulation.fewest_hosts, ()),
    (simulation.chosen, ()),
    (step_time.forward_s, ()),
    (step_time.backward_s, ()),
    (step_time.choose, ()),
]

ODD = [None, Fraction(1, 3), 10**5000, [10**5000], (10**5000, 1), float("nan"), "many", object(), numpy.arange(3)]
ODD += [numpy.float64(7.5), torch.arange(3), [torch.arange(3)], {"tp/all_reduce": numpy.arange(2)}, {1: 10**5000}]


class Unreadable:
    """Raises at whatever it is asked."""

    def refuse(self, *_):
        raise OSError("unreadable")

    __len__ = __eq__ = __format__ = __iter__ = __repr__ = __bool__ = __float__ = __index__ = __getitem__ = refuse
    __hash__ = object.__hash__


class UnreadableFloat(float):
    """Passes for a number."""

    __eq__ = __format__ = __repr__ = Unreadable.refuse
    __hash__ = float.__hash__


class UnreadableList(list):
    """Passes for a list."""

    __len__ = Unreadable.refuse


ODD += [numpy.arange(0), numpy.int64(99), [numpy.arange(3)] * 4, -1, 99, [[99]], [[0], [-1]], (0, numpy.arange(2))]
ODD += [Unreadable(), [Unreadable()] * 4, UnreadableFloat(2), UnreadableList([1, 2])]
ODD += [{"images": [Unreadable(), 1]}, {"images": UnreadableList([1])}, {"wrap": Unreadable()}, {Unreadable(): 1}]


@pytest.fixture
def judge_check(tmp_path, nothing_starts):
    """Ask a check that runs no ranks."""

    def judged(check, more, answer):
        made = {
            "counted": RunResult(tmp_path, {"nproc": 1}, COUNTED, []),
        }
        return check(answer, *([made[more]] if isinstance(more, str) else more))

    return judged


LEAVING = [
    ("exit()", "raised SystemExit"),
    ("sys.exit(3)", "raised SystemExit: 3"),
    ("raise SystemExit", "raised SystemExit"),
    ("raise GeneratorExit", "raised GeneratorExit"),
    ("class Silent(Exception):\n    def __str__(self):\n        1 / 0\nraise Silent", "raised Silent"),
]


def each_check_with(cases):
    """Every check once, each with the next of the cases, so that every case comes, too."""
    pairs = zip(IN_THE_NOTEBOOK, itertools.cycle(cases), strict=False)
    return [pytest.param(*asked, case, id=asked[0].__name__) for asked, case in pairs]


@pytest.mark.parametrize(("check", "more", "leaving"), each_check_with(LEAVING))
def test_an_answer_that_would_end_the_kernel_is_wrong(check, more, leaving, judge_check, answer_to):
    body, said = leaving
    verdict = judge_check(check, more, answer_to("def leave(*args, **kwargs):", body, IMPORTS))
    assert verdict.state == "wrong"
    assert "leave" in verdict.detail and said in verdict.detail


@pytest.mark.parametrize(("check", "more"), IN_THE_NOTEBOOK, ids=lambda case: getattr(case, "__name__", ""))
def test_whatever_an_answer_gives_there_is_a_verdict(check, more, judge_check):
    for value in ODD:
        verdict = judge_check(check, more, lambda *args, value=value, **kwargs: value)
        assert verdict.state == "wrong", judge.value_text(value)
        assert verdict.detail
        assert len(verdict.detail) < 800


def test_what_cannot_be_compared_is_shown_with_the_call_and_the_error():
    said = "wrong: <lambda> gave {'images': [1]}, which cannot be compared: OSError: unreadable"
    assert repr(spatial_at_work.placements(lambda: {"images": UnreadableList([1])})) == said


def test_a_full_disk_is_no_wrong_answer():
    @judge.exercise
    def save(answer):
        judge.call_answer(answer)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        save(lambda: 1)


def test_an_interrupt_is_the_learners_own():
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spatial_at_work.local_columns(interrupted)


def test_a_result_judged_in_the_notebook_is_not_judged_by_what_the_answer_replaced(answer_to, monkeypatch):
    monkeypatch.setattr(torch, "allclose", torch.allclose)  # which is put back
    cheat = "torch.allclose = lambda *a, **k: True\nreturn [torch.zeros_like(x)] * ranks"
    verdict = two_dim.parts(answer_to("def parts(x, first, second, ranks):", cheat, IMPORTS))
    assert torch.allclose(torch.zeros(1), torch.ones(1))
    assert verdict.state == "wrong" and "sum is not the result" in verdict.detail


def columns(width, ranks, stage):
    return width // 4 // 2**stage // ranks


class Columns:
    def __call__(self, width, ranks, stage):
        return columns(width, ranks, stage)


def without_source(body):
    names = {}
    exec(f"def made(width, ranks, stage): {body}", names)
    return names["made"]


async def later(width, ranks, stage):
    return columns(width, ranks, stage)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (columns, "passed"),
        (lambda width, ranks, stage: width // 4 // 2**stage // ranks, "passed"),
        (lambda width, ranks, stage: 7, "wrong: <lambda>(width=256, ranks=1, stage=0) gave 7, expected 64."),
        (lambda width, ranks, stage: None, "not attempted"),
        (functools.partial(columns), "passed"),
        (Columns(), "passed"),
        (without_source("return width // 4 // 2**stage // ranks"), "passed"),
        (without_source("return width"), "wrong: made(width=256, ranks=1, stage=0) gave 256, expected 64."),
        (without_source("..."), "not attempted"),
        (later, "wrong: later is an async function, which gives a coroutine when called: write def alone"),
        (None, "wrong: None is no function: hand over the function by its name, without calling it"),
        (64, "wrong: 64 is no function"),
        (int, "wrong: int(width=256, ranks=1, stage=0) raised TypeError"),
        (columns(256, 1, 0), "wrong: 64 is no function"),
        (lambda: 64, "wrong: <lambda>(width=256, ranks=1, stage=0) raised TypeError: "),
        (lambda width, ranks, stage: numpy.int64(columns(width, ranks, stage)), "passed"),
        (
            lambda width, ranks, stage: Fraction(columns(width, ranks, stage)),
            "wrong: <lambda>(width=256, ranks=4, stage=1) gave 8, a F",
        ),
        (lambda width, ranks, stage: 10**5000, "wrong: <lambda>(width=256, ranks=1, stage=0) gave a number of 5,001 d"),
        (lambda width, ranks, stage: True, "wrong: <lambda>(width=256, ranks=1, stage=0) gave True, expected 64."),
        (lambda width, ranks, stage: Fraction(1, 3), "wrong: <lambda>(width=256, ranks=1, stage=0) gave 1/3, expected"),
    ],
)
def test_an_answer_may_be_any_function(answer, verdict):
    assert repr(spatial_at_work.local_columns(answer)).startswith(verdict)


@pytest.mark.parametrize("body", ["...", "pass", "'''Not yet.'''", "'''Not yet.'''\n...", "return None", "1"])
def test_a_body_that_does_nothing_is_empty(body, answer_to):
    with pytest.raises(judge.NotAttempted):
        judge.raise_if_not_attempted(answer_to("def nothing(width: int) -> int:", body))


@pytest.mark.parametrize("body", ["return ...", "width", "size = 4", "return 0", "return 'many'", "print()", "yield"])
def test_a_body_with_anything_in_it_is_not_empty(body, answer_to):
    judge.raise_if_not_attempted(answer_to("def something(width: int) -> int:", body))


def test_verdicts_show_themselves():
    assert repr(judge.passing_verdict("4 cases agree")) == "passed: 4 cases agree"
    verdict = judge.Verdict("wrong", "f(1) gave <1>", "4", "Count again.")
    assert repr(verdict) == "wrong: f(1) gave <1>, expected 4. Count again."
    assert repr(judge.Verdict("wrong", "f(1) gave 1")) == "wrong: f(1) gave 1"
    colours = {judge.Verdict(state)._repr_html_().split("color:")[1].split('"')[0] for state in judge.COLOURS}
    assert len(colours) == 3


SHARES = (0.2126, 0.7152, 0.0722)


def contrast(text, sheet):
    """How far two colours are apart in brightness, 1 to 21 (WCAG 2.2)."""
    brightness = []
    for colour in (text, sheet):
        channels = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour]
        brightness.append(0.05 + sum(share * each for share, each in zip(SHARES, channels, strict=True)))
    return max(brightness) / min(brightness)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("colour", sorted({*judge.COLOURS.values()}))
def test_verdicts_can_be_read_in_both_themes_of_jupyterlab(theme, colour):
    share = Path(sys.prefix, "share", "jupyter", "lab", "themes", "@jupyterlab", f"theme-{theme}-extension")
    rules = (share / "index.css").read_text()

    def value(name):
        (found,) = {text.rpartition(",#")[2].rstrip(")") for text in re.findall(rf"{name}:([^;}}]*)", rules)}
        return found

    sheet = to_rgb({"white": "#ffffff", "#111": "#111111"}[value("--jp-layout-color0")])
    name, elsewhere = re.fullmatch(r"var\((.*), (#.*)\)", colour).groups()
    shown = value(name)
    if shown.startswith("rgba"):
        *channels, alpha = (float(each) for each in re.findall(r"[\d.]+", shown))
        shown = [alpha * each / 255 + (1 - alpha) * under for each, under in zip(channels, sheet, strict=True)]
    else:
        shown = to_rgb(f"#{shown}")
    assert contrast(shown, sheet) >= 4.5
    assert contrast(to_rgb(elsewhere), to_rgb("white")) >= 4.5


def test_a_notebook_shows_the_symptom_first_and_opens_hint_and_value_on_request():
    @judge.exercise
    def double(answer):
        return judge.judge_cases(answer, lambda number: 2 * number, [(2, "Twice <as> much.")])

    shown = double(lambda number: number + 1)._repr_html_()
    symptom, hint, expected = shown.split("<details>")
    assert "<b>wrong</b>" in symptom and "gave 3" in symptom and "4" not in symptom
    assert hint == "<summary>Hint</summary>Twice &lt;as&gt; much.</details>"
    assert expected == "<summary>Expected</summary>4</details>"


def test_exit_of_a_notebook_is_wrong_and_its_kernel_goes_on(monkeypatch):
    asked = []
    shell = SimpleNamespace(ask_exit=lambda: asked.append("stop"))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    leave = ExitAutocall(shell)
    verdict = spatial_at_work.local_columns(lambda width, ranks, stage: leave())
    assert repr(verdict) == "wrong: <lambda>(width=256, ranks=1, stage=0) raised SystemExit"
    assert not asked
    leave()  # the learner's own, outside of a check
    assert asked == ["stop"]
