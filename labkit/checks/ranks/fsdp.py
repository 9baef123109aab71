"""On a rank: a learner's function averages gradients beside an expert. Every rank has its own expert and data."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.models.moe import MixtureOfExperts


def feed(answer: Callable[..., None]) -> dict[str, Any]:
    """Call the answer once, with the model, its experts' parameters and the number of ranks.

    Returns:
        By name of the parameter, the gradient that the answer left, or None.
    """
    model = trained(dist.get_rank())
    parameters = dict(model.named_parameters())
    answer(model, {parameters[name] for name in experts_of(model)}, dist.get_world_size())
    return {name: parameter.grad for name, parameter in parameters.items()}


def trained(index: int) -> MixtureOfExperts:
    """Rank ``index``'s model after its backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtureOfExperts(expert_seed=index)
    inputs = model.get_input(torch.device("cpu"), seed=index)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    return model


def gradients_of(model: MixtureOfExperts) -> dict[str, Tensor]:
    """A model's gradients by the names of its parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def experts_of(model: MixtureOfExperts) -> list[str]:
    """Names of the parameters that each rank has for itself."""
    own = {parameter for module in model.local_modules() for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter in own]
