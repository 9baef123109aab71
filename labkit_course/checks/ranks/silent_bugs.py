"""Run a learner's step of a room of lab 7b."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from launch import museum
from launch.museum import visit


def run_answer(answer: Callable[..., Any], room: str) -> dict[str, Any]:
    """Call the answer with this rank's weights and everybody's inputs and targets.

    Return what it ``gave``, and the ``gradients`` that it left, None where there is none.
    """
    rooms = museum.open_room(room)
    weights = visit.own_weights(rooms)
    # The answer gets a dict of its own, because it may change it.
    gave = answer(dict(weights), *rooms.batch(0))
    gradients = {name: weight.grad for name, weight in weights.items()}
    is_number = isinstance(gave, float) or (isinstance(gave, Tensor) and gave.numel() == 1)
    return {"gave": float(gave) if is_number else type(gave).__name__, "gradients": gradients}
