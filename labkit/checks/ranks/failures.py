"""Run a learner's recorder on collectives, and a training loop on each rank's samples."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.checks.judge import WrongAnswer

# Number of batches of each of the four ranks.
BATCH_COUNTS = (5, 7, 3, 4)
STEPS, SAMPLES, LEARNING_RATE = 3, 5, 0.1


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer; ``what`` is "common", "recorded" or "mended"."""
    if what == "common":
        got = answer(BATCH_COUNTS[dist.get_rank()])
        return {"got": int(got) if isinstance(got, int) else None, "kind": type(got).__name__}
    if what == "mended":
        model = make_equal_model()
        answer(model, rank_batches(dist.get_rank()), LEARNING_RATE)
        return {"got": [parameter.detach() for parameter in model.parameters()]}
    return run_call_log(answer)


def run_call_log(answer: Callable[..., Any]) -> dict[str, Any]:
    """Let the answer record two real collectives and two mock ones.

    Returns:
        ``sums`` and ``log`` entries of the real ones; ``handle``, type of the asynchronous result;
        ``during``, the log while the third call runs, if it was ``called``; ``after``, the last
        entry once the fourth has raised; ``swallowed``, whether its error was lost.
    """
    log: list[Any] = []
    during: list[Any] = []

    def all_gather(tensor: Tensor) -> None:
        during.append([dict(entry) for entry in log])

    def broadcast(tensor: Tensor, src: int) -> None:
        raise ValueError("a broken collective")

    summed, largest = torch.ones(3), torch.full((2, 2), 1.0 + dist.get_rank())
    _make_logger(answer, dist.all_reduce, log)(summed)
    reduce_later = _make_logger(answer, dist.all_reduce, log)
    handle = reduce_later(largest, op=dist.ReduceOp.MAX, async_op=True)
    if handle is not None:
        handle.wait()
    # The next calls append to the log, or replace its entries.
    kept = [dict(entry) for entry in log]
    _make_logger(answer, all_gather, log)(torch.zeros(4))
    swallowed = False
    try:
        _make_logger(answer, broadcast, log)(torch.zeros(1), src=0)
        swallowed = True
    except ValueError:
        pass
    return {
        "sums": [summed, largest],
        "handle": type(handle).__name__,
        "log": _plain_entries(kept),
        "during": _plain_entries(during[0] if during else []),
        "called": bool(during),
        "after": _plain_entries(log[-1:]),
        "swallowed": swallowed,
    }


def _make_logger(
    answer: Callable[..., Any], collective: Callable[..., Any], log: list[Any]
) -> Callable[..., Any]:
    call = answer(collective, log)
    if not callable(call):
        asked = f"recorded({collective.__name__}, log)"
        raise WrongAnswer(f"{asked} gave a {type(call).__name__}, not a function")
    return call


def _plain_entries(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert log entries to types that torch.load reads with weights_only=True."""
    plain = []
    for entry in entries:
        if not isinstance(entry, dict):
            said = f"an entry of the log is a {type(entry).__name__}"
            raise WrongAnswer(said, expected="a dict")
        shape = entry.get("shape")
        shape = list(shape) if isinstance(shape, tuple | list) else None
        call, done = str(entry.get("call")), entry.get("done")
        plain.append({"call": call, "shape": shape, "done": done})
    return plain


def make_equal_model() -> nn.Module:
    """Return a small network with equal weights on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def rank_batches(index: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's inputs [SAMPLES, 6] and targets [SAMPLES, 2] of each step."""
    draw = torch.Generator().manual_seed(100 + index)
    return [
        (torch.randn(SAMPLES, 6, generator=draw), torch.randn(SAMPLES, 2, generator=draw))
        for _ in range(STEPS)
    ]


def train_with_faults(
    ranks: int,
    *,
    reduced: Callable[[Tensor], bool] = lambda parameter: True,
    divisor: float = 0,
    stale: bool = False,
) -> list[list[Tensor]]:
    """Simulate the exercise's training in this process and return the parameters of every rank.

    ``reduced`` tells whether a parameter's gradients are summed over the ranks. The sums are
    divided by ``divisor``, or by ``ranks`` if it is 0. ``stale`` never updates the last layer's
    weight.
    """
    models = [make_equal_model() for _ in range(ranks)]
    for model in models:
        model[2].weight.data.zero_()  # type: ignore[index]
    for step in range(STEPS):
        for index, model in enumerate(models):
            model.zero_grad()
            inputs, targets = rank_batches(index)[step]
            nn.functional.mse_loss(model(inputs), targets).backward()
        for places in zip(*(model.named_parameters() for model in models), strict=True):
            gradients = [place.grad for _, place in places if place.grad is not None]
            total = sum(gradients[1:], gradients[0].clone())
            for (name, place), gradient in zip(places, gradients, strict=True):
                if stale and name == "2.weight":
                    continue
                if reduced(place):
                    gradient = total / (divisor or ranks)
                place.data -= LEARNING_RATE * gradient
    return [[place.detach() for place in model.parameters()] for model in models]
