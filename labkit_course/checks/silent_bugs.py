"""Checks of lab 7b, the museum of silent bugs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit_course.checks.judge import (
    Verdict,
    answer_name,
    call_answer,
    exercise,
    expect,
    passing_verdict,
    projection,
    value_text,
)
from labkit_course.checks.on_ranks import judge_on_ranks
from launch import museum
from launch.museum import typed, visit

# Two stages need two ranks; another number shows what was counted on the first.
SIZES = {"tied": (2,)}
OTHER_SIZES = (2, 3)
HINTS = {
    "norm": "Of which weights does a rank see only its own tokens?",
    "counts": "A rank with few targets weighs each of them more. By what should all divide?",
    "experts": "The experts' gradient already holds the losses of all ranks, added up.",
    "tokens": "The tokens enter a region where each rank has a part. What does lab 5 put there?",
    "router": "Which tensors enter the region where each rank has a part of the features?",
    "gathered": "A collective of torch.distributed has no gradient. Which given function has?",
    "smoothing": "Each rank's loss should be the same. Which of its three terms is not?",
    "extra": "all_reduce works in place. What does the name `own` hold afterwards?",
    "clip": "A whole weight counts once, a cut one on every rank. Which is which?",
    "tied": "Both stages have a gradient of the same table.",
    "unwaited": "When does the sum lie in the row?",
    "bfloat": "In which dtype are the numbers of this tensor when they are added up?",
    "scale": "Is any gradient of the step as it stands wrong?",
}
# Rooms whose gradients the comparison of exercise 1 has to judge: cut weights, and a stage's own.
COMPARED = ("norm", "experts", "tied")
# Rooms whose inputs and weights exercise 6 declares.
DECLARED = ("tokens", "norm")
MEANINGS = {
    "R": "a rank's gradient is a term of the sum",
    "I": "its gradient is the same on all ranks",
    "V": "a rank has its own",
}

# The answers of exercise 5, and where to look if one is not given.
DIAGNOSES = {
    "right": "Is any gradient off by more than 10⁻⁴?",
    "factor": "Does any wrong gradient have no rest, up to rounding?",
    "small": "Which error is the largest?",
    "sum": "Do the ranks' gradients of any weight differ by more than 10⁻⁴?",
    "terms": "None of the other four fits.",
}
# What exercise 5 asks about: a table, its diagnosis, and (off by, factor, ranks differ by) of each
# weight. The first thirteen are those of real rooms on two ranks, with float32's rounding.
TABLES: dict[str, tuple[str, dict[str, tuple[float, float, float | None]]]] = {
    "scale": ("right", {"scale": (6.885e-08, 1.0, 0.0), "up": (8.003e-08, 1.0, None)}),
    "norm": (
        "sum",
        {"norm": (0.5223722, 0.4808625, 0.1222313), "up": (8e-08, 1.0, None)},
    ),
    "counts": (
        "terms",
        {"first": (0.170743, 1.0176786, 0.0), "last": (0.1521816, 1.0246419, 0.0)},
    ),
    "experts": (
        "factor",
        {"embed": (2.289e-07, 0.99999994, 0.0), "experts": (1.0, 2.0, None)},
    ),
    "tokens": (
        "sum",
        {"embed": (0.4101369, 0.8524973, 0.6299468), "down": (5.4e-08, 1.0, None)},
    ),
    "gathered": (
        "terms",
        {"picture": (1.198e-07, 1.0, 0.0), "text": (0.2301704, 0.9406449, 0.0)},
    ),
    "smoothing": (
        "small",
        {"trunk": (0.0080259, 1.0006007, 0.0), "head": (0.0082546, 1.0007334, None)},
    ),
    "extra": (
        "factor",
        {
            "trunk": (0.1005992, 1.006464, 0.0),
            "head": (2.038e-07, 1.0, 0.0),
            "extra": (1.0000001192092896, 2.0, 0.0),
        },
    ),
    "clip": (
        "factor",
        {
            "up": (0.046129874885082245, 1.0461299419403076, None),
            "down": (0.04612988233566284, 1.046129822731018, None),
            "head": (0.04612990841269493, 1.0461300611495972, 0.0),
        },
    ),
    "tied": ("sum", {"words": (0.7447929, 0.4101025, 0.9269714), "first": (0.0, 1.0, None)}),
    "router": ("sum", {"gate": (0.8069481, 0.3977984, 1.0935513), "up": (8e-08, 1.0, None)}),
    "unwaited": (
        "sum",
        {"first": (0.5279715, 0.4873447, 0.2537604), "last": (0.5236636, 0.4891217, 0.231044)},
    ),
    "bfloat": ("small", {"first": (1.789e-07, 1.0, 0.0), "last": (0.0022921, 0.999818, 0.0)}),
    "a mean that was taken twice": (
        "factor",
        {"first": (0.5, 0.5, 0.0), "last": (0.49999997, 0.5, 0.0)},
    ),
    "a count of one token too many": (
        "factor",
        {"first": (0.0010405, 0.9989595, 0.0), "last": (0.0010406, 0.9989594, 0.0)},
    ),
    "router on three ranks": (
        "sum",
        {"gate": (1.0249401, 0.1981817, 1.0973198), "head": (7e-08, 0.9999999, 0.0)},
    ),
    "smoothing on three ranks": (
        "terms",
        {"trunk": (0.0160519, 1.0012012, 0.0), "head": (0.0176193, 1.0038857, None)},
    ),
}


@exercise
def parity(answer: Callable[..., Any], timeout_s: float = 60) -> Verdict:
    """Exercise 1: how far each gradient of a rank is off, and its factor."""

    def judge(ranks: int, index: int, output: dict[str, Any]) -> None:
        for room, (found, right) in output.items():
            _judge_comparison(f"in the room {room}", found, right)

    waiting = "the comparison needs no other rank"
    how: dict[str, Any] = {"judge": judge, "timeout_s": timeout_s, "rooms": COMPARED}
    judge_on_ranks("comparison", answer, sizes=(2,), waiting=waiting, name_rank=True, **how)
    return passing_verdict(f"it judges the gradients of {len(COMPARED)} rooms as labkit does")


def _judge_comparison(where: str, found: Any, right: dict[str, tuple[float, float]]) -> None:
    expected = "{name: (off by, factor)}"
    expect(isinstance(found, dict), f"{where} it gave {value_text(found)}", expected)
    for name, wanted in right.items():
        expect(name in found, f"{where} it says nothing of {name}", "every weight of got")
        pair = found[name]
        said = f"{where} it gave {value_text(pair)} for {name}"
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        expect(is_pair and not any(isinstance(each, str) for each in pair), said, expected)
        names = ("off by", "factor")
        hints = ("A length, as a part of the right one's.", "got · right over right · right.")
        for value, one, what, hint in zip(pair, wanted, names, hints, strict=True):
            said = f"{where}, {what} of {name} is {value:.4g}"
            expect(abs(value - one) < 1e-3 * max(1, abs(one)), said, f"{one:.4g}", hint)


@exercise
def diagnosed(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: what kind of mistake a room's table shows."""
    for what, (right, rows) in TABLES.items():
        asked = f"{answer_name(answer)}(the table of {what})"
        found = call_answer(answer, dict(rows), in_words=asked)
        said = f"{asked} gave {value_text(found)}"
        known = isinstance(found, str) and found in DIAGNOSES
        expect(known, said, f"one of {', '.join(DIAGNOSES)}")
        numbers = "; ".join(f"{name} {value_text(row)}" for name, row in rows.items())
        expect(found == right, f"{said}, where the table has {numbers}", right, DIAGNOSES[right])
    return passing_verdict(f"{len(TABLES)} tables, {len(TABLES) - len(museum.ROOMS)} of them new")


@exercise
def declared(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the types of a room's inputs and weights over the ranks."""
    for room in DECLARED:
        asked = f"{answer_name(answer)}({room!r})"
        found, right = call_answer(answer, room, in_words=asked), typed.declare(room)
        said = f"{asked} gave {value_text(found)}"
        expect(isinstance(found, dict), said, "a dict", "A letter for each name.")
        for name, kind in right.items():
            expect(name in found, f"{asked} says nothing of {name}", "R, I or V")
            given = found[name]
            known = isinstance(given, str) and given in MEANINGS
            expect(known, f"{asked}: {name} is {value_text(given)}", "R, I or V")
            said = f"{asked}: {name} is {given}, so {MEANINGS[given]}"
            hint = "Is it cut? If not: has a rank all tokens, or its share of them?"
            expect(given == kind, said, kind, hint)
    return passing_verdict(f"the types of {' and '.join(DECLARED)}")


@exercise
def mended(answer: Callable[..., Any], room: str, timeout_s: float = 60) -> Verdict:
    """Hold the gradients that a step leaves on each rank, and its loss, against one device's."""
    rooms = museum.open_room(room)
    right, loss = visit.right_gradients(rooms)

    def judge_all(ranks: int, outputs: list[dict[str, Any]]) -> None:
        for name, whole in right.items():
            shares = [visit.share(rooms, name, whole, index, ranks) for index in range(ranks)]
            pairs = [
                (output["gradients"][name], wanted)
                for output, wanted in zip(outputs, shares, strict=True)
                if wanted is not None
            ]
            _judge_gradient(name, pairs, HINTS[room])
        for output in outputs:
            said = f"the gradients are right, but the step returned {_loss_text(output['gave'])}"
            near = not isinstance(output["gave"], str) and abs(output["gave"] / loss - 1) < 1e-3
            expect(
                near, said, f"the loss of all tokens, {loss:.4f}", "Return what a run would log."
            )

    sizes = SIZES.get(room, OTHER_SIZES)
    waiting = "does every rank make the same calls?"
    how: dict[str, Any] = {"judge_all": judge_all, "timeout_s": timeout_s, "room": room}
    judge_on_ranks("silent_bugs", answer, sizes=sizes, waiting=waiting, **how)
    on = " and ".join(map(str, sizes))
    return passing_verdict(f"the gradients of {', '.join(right)} are one device's on {on} ranks")


def _judge_gradient(name: str, pairs: list[tuple[Tensor | None, Tensor]], hint: str) -> None:
    expected = "what one device has"
    for got, wanted in pairs:
        expect(got is not None, f"{name} has no gradient", expected, hint)
        assert got is not None
        error = float((got - wanted).norm() / wanted.norm())
        if error < museum.TOLERANCE:
            continue
        ratio = projection(got, wanted)
        is_scaled = abs(ratio) > 1e-3 and torch.allclose(got, ratio * wanted, rtol=1e-3, atol=1e-6)
        seen = f"{ratio:.3g} times the right one" if is_scaled else f"off by {error:.2%}"
        expect(False, f"the gradient of {name} is {seen}", expected, hint)


def _loss_text(gave: float | str) -> str:
    return (
        f"{'an' if gave[0] in 'aeiou' else 'a'} {gave}" if isinstance(gave, str) else f"{gave:.4f}"
    )
