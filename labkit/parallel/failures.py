"""Lab 7: a collective that logs its calls, and a batch processed in pieces."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def recorded(collective: Callable[..., Any], log: list[dict[str, Any]]) -> Callable[..., Any]:
    """Return a collective that logs each call: its name (``call``), ``shape``, and if ``done``."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        entry = {"call": collective.__name__, "shape": tuple(tensor.shape), "done": False}
        # Before the call, so that a call that never returns leaves an entry.
        log.append(entry)
        result = collective(tensor, *args, **kwargs)
        entry["done"] = True
        return result

    return call


def backward_in_pieces(model: nn.Module, inputs: Tensor, targets: Tensor, pieces: int) -> None:
    """Accumulate the gradient of the batch's mean squared error, piece by piece to save memory."""
    for x, y in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        # Weighted, because pieces of an uneven batch have means over different numbers of samples.
        (nn.functional.mse_loss(model(x), y) * len(x) / len(inputs)).backward()
