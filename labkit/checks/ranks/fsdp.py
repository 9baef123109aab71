"""Run a learner's functions that shard a small model, or average gradients around local experts."""

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.models.moe import MixtureOfExperts
from labkit.session.counted_group import GroupTraffic

WIDTH, INNER, ROWS, RATE = 4, 5, 3, 0.1


def run_answer(answer: Callable[..., Any], what: str = "experts") -> dict[str, Any]:
    """Return results of ``run_small_fsdp`` for "units".

    For "experts" return the ``gradients`` that the answer leaves, and calls and bytes ``sent``, by
    collective.
    """
    if what == "units":
        return run_small_fsdp(answer)
    model = make_expert_model(dist.get_rank())
    parameters = dict(model.named_parameters())
    experts = {parameters[name] for name in expert_names(model)}
    with GroupTraffic() as traffic:
        answer(model, experts, dist.get_world_size())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"gradients": gradients, "sent": traffic.totals()}


def run_small_fsdp(answer: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Let the answer shard each unit of a small model, and train two steps.

    Return ``shards`` of all ranks, or names of other types. If their shape and dtype are right,
    also ``outputs`` of both steps, ``gradients`` and calls and bytes ``sent`` in the first, and per
    unit bytes of full parameters ``held`` by moment and of full gradients ``left`` at the end.
    """
    warnings.filterwarnings("ignore", message=".*is deprecated")
    units, (inputs, targets) = two_units(), rank_batch(dist.get_rank())
    shards, ranks = [answer(unit) for unit in units], dist.get_world_size()
    given: list[Any] = [
        each.detach().clone() if isinstance(each, nn.Parameter) else type(each).__name__
        for each in shards
    ]
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, given)
    # All ranks decide alike, as all look at all shards: a rank that trained alone would hang.
    wanted = (-(-sum(p.numel() for p in two_units()[0].parameters()) // ranks),), torch.float32
    for shard in chain(*everyone):
        if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != wanted:
            return {"shards": everyone}
    held = {"at rest": [storage_bytes(unit) for unit in units]}

    def note_first_unit(*_: Any) -> None:
        held["forward"] = [storage_bytes(units[0])]

    units[1].register_forward_pre_hook(note_first_unit)
    model = nn.Sequential(*units)
    with GroupTraffic() as traffic:
        output = model(inputs)
        (output - targets).square().mean().backward()
    held["after"] = [storage_bytes(unit) for unit in units]
    gradients = [None if shard.grad is None else shard.grad.clone() for shard in shards]
    left = [sum(p.grad.nbytes for p in unit.parameters() if p.grad is not None) for unit in units]
    with torch.no_grad():
        for shard in shards:
            if shard.grad is not None:
                shard -= RATE * shard.grad
        outputs = [output, model(inputs)]
    found = {"shards": everyone, "outputs": outputs, "gradients": gradients}
    return found | {"held": held, "left": left, "sent": traffic.totals()}


def storage_bytes(unit: nn.Module) -> int:
    """Return the bytes of memory behind a unit's parameters."""
    memory = [parameter.untyped_storage() for parameter in unit.parameters()]
    # Parameters that are views of one flat tensor share a storage, which counts once.
    return sum({each._cdata: each.nbytes() for each in memory}.values())


def two_units() -> list[nn.Sequential]:
    """Return two units, equal on all ranks, of 49 elements each: 2 and 3 ranks need padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(2)]
    return [nn.Sequential(*each) for each in layers]


def rank_batch(index: int) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets."""
    draw = torch.Generator().manual_seed(index)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def make_expert_model(index: int) -> MixtureOfExperts:
    """Return a rank's model after one backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtureOfExperts(expert_seed=index)
    inputs = model.get_input(torch.device("cpu"), seed=index)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    return model


def gradients_by_name(model: MixtureOfExperts) -> dict[str, Tensor]:
    """Return a model's gradients by the names of its parameters."""
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {name: each for name, each in gradients.items() if each is not None}


def expert_names(model: MixtureOfExperts) -> list[str]:
    """Return the names of the parameters that differ between ranks."""
    own = {parameter for module in model.local_modules() for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter in own]
