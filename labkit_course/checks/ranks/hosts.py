"""Ask every rank whether all stop, when some of them are asked to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CASES = ("nobody", "rank 0", "the last rank", "everybody")


def run_answer(answer: Callable[..., Any]) -> dict[str, Any]:
    """Return what the answer says in each case; the name of its type where that is no bool."""
    last = dist.get_world_size() - 1
    is_asked = {"nobody": [], "rank 0": [0], "the last rank": [last], "everybody": range(last + 1)}
    found = [answer(dist.get_rank() in is_asked[case]) for case in CASES]
    return {"stops": [_as_bool(each) for each in found]}


def _as_bool(value: Any) -> bool | str:
    is_one = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return bool(value) if is_one else type(value).__name__
