"""Let a learner's parity comparison of lab 7b judge the gradients that rooms leave."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from launch import museum
from launch.museum import visit


def run_answer(answer: Callable[..., Any], rooms: Sequence[str]) -> dict[str, Any]:
    """Return for each room what the answer says of its gradients, and what is right."""
    said = {}
    for name in rooms:
        room, cut = museum.open_room(name), museum.cut_weights(name)
        whole, _ = visit.right_gradients(room)
        got = visit.own_gradients(room)
        right = visit.parity(got, whole, cut)
        # The answer gets tensors of its own, because it may change them.
        said[name] = [_plain(answer(_copies(got), _copies(whole), dict(cut))), right]
    return said


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {str(name): _plain(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    try:
        return float(found)
    except (TypeError, ValueError):
        return f"a {type(found).__name__}"
