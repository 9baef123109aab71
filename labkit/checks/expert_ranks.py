"""A rank program: lets a learner's function average gradients beside experts, and holds them against one device.

Every rank has an expert of its own and the same shared part. One device computes the gradients of all ranks in turn.
What the answer makes of a rank's gradients is compared with them. The first difference ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import rank
from labkit.models.moe import MixtureOfExperts


@dataclass
class Config:
    """Whose answer."""

    answer: str = ""
    """File with the source of the learner's function."""
    name: str = "average_gradients"
    """Name of the function in it."""


class Wrong(Exception):
    """The answer is wrong; the message is for the learner."""


def main(config: Config) -> None:
    """Call the answer once and compare."""
    with rank.session() as here:
        namespace: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist}
        exec(compile(Path(config.answer).read_text(), config.answer, "exec"), namespace)
        everyone = [gradients_of(trained(index)) for index in range(here.world_size)]
        model = trained(here.rank)
        experts = {parameter for module in model.local_modules() for parameter in module.parameters()}
        namespace[config.name](model, set(experts), here.world_size)
        compare(model, experts, everyone, here.rank)
        dist.barrier()


def trained(index: int) -> MixtureOfExperts:
    """Rank ``index``'s model after its backward pass."""
    torch.manual_seed(0)
    model = MixtureOfExperts(expert_seed=index)
    inputs = model.get_input(torch.device("cpu"), seed=index)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's gradients by the names of its parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(model: nn.Module, experts: set[nn.Parameter], everyone: list[dict[str, Tensor]], index: int) -> None:
    """Raise Wrong, naming the parameter, where a gradient differs from one device's.

    Args:
        model: after the answer.
        experts: parameters whose gradients must be this rank's own.
        everyone: each rank's gradients by name, before the answer.
        index: of this rank.
    """
    for name, parameter in model.named_parameters():
        own, mean = everyone[index][name], torch.stack([each[name] for each in everyone]).mean(dim=0)
        kind, expected = ("expert's", own) if parameter in experts else ("shared", mean)
        if parameter.grad is None:
            raise Wrong(f"the {kind} gradient of {name} is gone")
        if not same(parameter.grad, expected):
            seen = describe(parameter.grad, own, mean, len(everyone))
            fix = "it must stay this rank's own" if parameter in experts else "it must be the mean over the ranks"
            raise Wrong(f"the {kind} gradient of {name} {seen}: {fix}")


def describe(got: Tensor, own: Tensor, mean: Tensor, ranks: int) -> str:
    """What a wrong gradient looks like."""
    known = {"is still this rank's own": own, "was averaged": mean, "was summed and not divided": ranks * mean,
             "was divided but not summed": own / ranks}  # fmt: skip
    return next((words for words, value in known.items() if same(got, value)), "is wrong")


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether two gradients agree but for rounding."""
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-7)


if __name__ == "__main__":
    rank.start(main, Config)
