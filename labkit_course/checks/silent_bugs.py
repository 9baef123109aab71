"""Checks of lab 7b, the museum of silent bugs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit_course.checks.judge import Verdict, exercise, expect, passing_verdict
from labkit_course.checks.on_ranks import judge_on_ranks
from launch import museum
from launch.museum import visit

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
    "extra": "The gradients are averaged over the ranks at the end. What is divided before?",
    "clip": "All ranks need the norm of the whole gradient. Whose squares does a rank not have?",
    "tied": "Both stages have a gradient of the same table.",
    "accumulate": "How often is the first half's gradient sent?",
    "unwaited": "When does the sum lie in the row?",
    "bfloat": "In which dtype are the numbers of this tensor when they are added up?",
}


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
        ratio = float((got * wanted).sum() / wanted.square().sum())
        is_scaled = abs(ratio) > 1e-3 and torch.allclose(got, ratio * wanted, rtol=1e-3, atol=1e-6)
        seen = f"{ratio:.3g} times the right one" if is_scaled else f"off by {error:.2%}"
        expect(False, f"the gradient of {name} is {seen}", expected, hint)


def _loss_text(gave: float | str) -> str:
    return (
        f"{'an' if gave[0] in 'aeiou' else 'a'} {gave}" if isinstance(gave, str) else f"{gave:.4f}"
    )
