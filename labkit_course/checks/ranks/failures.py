"""Run a learner's recorder on collectives, and other answers on each rank's own data."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.session.counted_group import GroupTraffic
from labkit_course.checks.judge import WrongAnswer
from labkit_course.checks.ranks.collectives import run_training

# Number of batches of each of at most four ranks.
BATCH_COUNTS = (5, 7, 4, 3)


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer; ``what`` is "common", "recorded" or "mended"."""
    if what == "common":
        got = answer(BATCH_COUNTS[dist.get_rank()])
        return {"got": int(got) if isinstance(got, int) else None, "kind": type(got).__name__}
    # All ranks start alike, because the three bugs to be found lie elsewhere.
    if what == "mended":
        return {"got": run_training(answer, same_start=True)}
    return run_call_log(answer)


def run_call_log(answer: Callable[..., Any]) -> dict[str, Any]:
    """Let the answer record two real collectives and two mock ones.

    Return ``reduced`` tensors, ``log``, and calls and bytes ``sent`` of the real ones; ``handle``,
    type of the asynchronous result; the log ``during`` the third call; whether the last one's error
    was ``swallowed``, and its entry ``after``.
    """
    log: list[Any] = []
    summed, largest = (torch.full(shape, 1.0 + dist.get_rank()) for shape in ((3,), (2, 2)))
    with GroupTraffic() as traffic:
        _make_logger(answer, dist.all_reduce, log)(summed)
        reduce_later = _make_logger(answer, dist.all_reduce, log)
        handle = reduce_later(largest, op=dist.ReduceOp.MAX, async_op=True)
        if handle is not None:
            handle.wait()
    # Entries are copied now, because the next calls may replace them.
    found: dict[str, Any] = {"reduced": [summed, largest], "handle": type(handle).__name__}
    found |= {"log": _plain_entries(log), "during": [], "swallowed": True}
    found["sent"] = traffic.totals()

    def all_gather(tensor: Tensor) -> None:
        found["during"] = _plain_entries(log)

    def broadcast(tensor: Tensor, src: int) -> None:
        raise ValueError("a broken collective")

    _make_logger(answer, all_gather, log)(torch.zeros(4))
    try:
        _make_logger(answer, broadcast, log)(torch.zeros(1), src=0)
    except ValueError:
        found["swallowed"] = False
    return found | {"after": _plain_entries(log[-1:])}


def _make_logger(
    answer: Callable[..., Any], collective: Callable[..., Any], log: list[Any]
) -> Callable[..., Any]:
    call = answer(collective, log)
    if not callable(call):
        asked = f"recorded({collective.__name__}, log)"
        raise WrongAnswer(f"{asked} gave a {type(call).__name__}, not a function")
    return call


def _plain_entries(entries: Sequence[Any]) -> list[dict[str, Any]]:
    # torch.load with weights_only=True reads no other types.
    plain = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise WrongAnswer(f"an entry of the log is a {type(entry).__name__}, not a dict")
        shape, done = entry.get("shape"), entry.get("done")
        shape = [*map(int, shape)] if isinstance(shape, tuple | list) else None
        done = done if isinstance(done, bool) else type(done).__name__
        plain.append({"call": str(entry.get("call")), "shape": shape, "done": done})
    return plain
