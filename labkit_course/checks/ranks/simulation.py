"""Run a learner's training loop on real ranks, or, as a program, on a simulated one."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import rank
from launch.given import clips

WIDTH = 16
# The gradient of the first and the last batch is longer than 1, that of the second is shorter.
SCALES = (4.0, 0.3, 2.0)


def run_answer(answer: Callable[..., Any]) -> dict[str, Any]:
    """Train with the answer and with the given loop, which also clips never, or always.

    Return the weights by name, the losses of both loops, and the calls that the answer made.
    """
    torch.manual_seed(0)
    model, batches = nn.Linear(WIDTH, WIDTH, bias=False), own_batches(dist.get_rank())
    models = {name: deepcopy(model) for name in ("answer", "right", "never", "always")}
    gave = answer(models["answer"], [batch.clone() for batch in batches])
    right = clips.train(models["right"], batches)
    train_without_branch(models["never"], batches, clips_always=False)
    train_without_branch(models["always"], batches, clips_always=True)
    weights = {name: each.weight.detach().clone() for name, each in models.items()}
    return {"weights": weights, "losses": plain_losses(gave), "right_losses": right}


def own_batches(index: int) -> list[Tensor]:
    """Return a rank's batches."""
    draws = torch.Generator().manual_seed(1 + index)
    return [scale * torch.randn(8, WIDTH, generator=draws) for scale in SCALES]


def train_without_branch(
    model: nn.Linear, batches: Sequence[Tensor], *, clips_always: bool
) -> None:
    """Take the steps of the given loop, but divide each gradient by its norm, or none."""
    for batch in batches:
        (gradient,) = torch.autograd.grad(model(batch).square().mean(), [model.weight])
        dist.all_reduce(gradient)
        with torch.no_grad():
            model.weight -= 0.1 * (gradient / gradient.norm() if clips_always else gradient)


def plain_losses(gave: Any) -> list[float] | str:
    """Return losses as numbers, or the type's name of what are none."""
    try:
        return [float(each) for each in gave]
    except (TypeError, ValueError, RuntimeError):
        return type(gave).__name__


@rank.replaceable
def train(model: nn.Linear, batches: list[Tensor]) -> Any:
    """Stand in for the learner's loop, which the check hands over."""
    return clips.train(model, batches)


@dataclass
class Config:
    """Nothing to choose."""


def main(config: Config) -> None:
    """Train in one step of a simulated rank."""
    with rank.session() as here:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        for _ in here.steps(1, track=[model]):
            train(model, [torch.randn(8, WIDTH) for _ in SCALES])


if __name__ == "__main__":
    rank.run_main(main, Config)
