"""Inspect a model with all-gather extensions: what it holds, gathers, and leaves in memory.

Apply ``fully_shard`` before. Every function that gathers is a collective, and leaves the units
sharded.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

GATHER_ROUNDS = 15
"""Timed rounds; the fastest counts, because every disturbance makes a round slower."""


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's elements, such as a TwoTensor's halves."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def plain_shards(parameter: Tensor) -> list[Tensor]:
    """Return the plain tensors of this rank's shard of a parameter, sharing its memory."""
    with torch.no_grad():
        return plain_tensors(parameter.to_local())  # type: ignore[attr-defined]


class GatherErrors(NamedTuple):
    """Errors of gathered weights, of the worst parameter; NaN if a weight is NaN."""

    largest: float  # the largest error, divided by the parameter's largest weight
    rms: float  # the root mean square error, divided by the root mean square of the weights


@torch.no_grad()
def gather_errors(model: nn.Module) -> GatherErrors:
    """Compare what a model gathers with its exact weights."""
    _reshard_units(model)
    sharded = [(name, each) for name, each in model.named_parameters() if isinstance(each, DTensor)]
    # clone waits for a gather that may still be on its way.
    exact = {name: plain_tensors(each.full_tensor().clone()) for name, each in sharded}
    found = [torch.zeros(2)]
    for _, gathered in _gather_units(model):
        for name, each in gathered.items():
            for whole, expected in zip(plain_tensors(each), exact[name], strict=True):
                found.append(torch.stack(rounding_errors(whole.float(), expected)).cpu())
    return GatherErrors(*torch.stack(found).amax(dim=0).tolist())


def rounding_errors(rounded: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two fields of ``GatherErrors`` for one parameter."""
    # A parameter of zeros must not divide by 0.
    off, tiny = rounded - exact, torch.finfo(exact.dtype).tiny
    largest = off.abs().max() / exact.abs().max().clamp(min=tiny)
    return largest, _rms(off) / _rms(exact).clamp(min=tiny)


def _rms(numbers: Tensor) -> Tensor:
    return numbers.square().mean().sqrt()


def gather_memory_bytes(model: nn.Module) -> int:
    """Return the bytes of gathered parameters while their unit computes, summed over units.

    They are the parameters and what was gathered for them; shared memory counts once.
    """
    total = 0
    for unit, whole in _gather_units(model):
        # What FSDP2 gathered and keeps until a reshard; private to it (2.11 to 2.13).
        group = unit._get_fsdp_state()._fsdp_param_group
        gathered = [each.all_gather_outputs for each in (group.fsdp_params if group else ())]
        held = [*map(plain_tensors, whole.values()), *gathered]
        memory = [tensor.untyped_storage() for tensors in held for tensor in tensors]
        total += sum({storage._cdata: storage.nbytes() for storage in memory}.values())
    return total


def leak_bytes(model: nn.Module) -> dict[str, int]:
    """Gather and free every unit; return the bytes of full parameters that are left, by name.

    Correct hooks leave none. A ``fsdp_post_all_gather`` that allocates the parameter's memory, and
    does not return it to be freed, leaves a whole parameter on every rank.
    """
    # A list, so that all units are sharded again.
    gathered = [item for _, whole in list(_gather_units(model)) for item in whole.items()]
    # A freed tensor keeps its shape, but its storage is empty.
    left = {
        name: sum(plain.untyped_storage().nbytes() for plain in plain_tensors(each))
        for name, each in gathered
    }
    return {name: size for name, size in left.items() if size}


def refuse_leak(model: nn.Module) -> None:
    """Raise ValueError if ``leak_bytes`` finds any."""
    for name, size in leak_bytes(model).items():
        raise ValueError(
            f"{name}: {size} bytes of the full parameter are left after reshard, 0 should be:"
            " fsdp_post_all_gather must also return the tensors that it allocated"
        )


def _reshard_units(model: nn.Module) -> dict[str, FSDPModule]:
    units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    # A unit that a forward pass left gathered would count again for the root.
    for unit in units.values():
        unit.reshard()
    return units


def _gather_units(model: nn.Module) -> Iterator[tuple[FSDPModule, dict[str, Tensor]]]:
    """Gather one unit after another; yield it and its own full parameters, then shard it again."""
    for name, unit in _reshard_units(model).items():
        unit.unshard()
        named = unit.named_parameters(name)  # type: ignore[attr-defined]
        yield unit, {key: each for key, each in named if not isinstance(each, DTensor)}
        unit.reshard()


def gather_ms(model: nn.Module, rounds: int = GATHER_ROUNDS) -> tuple[float, float]:
    """Return the milliseconds to gather and free every unit in turn, and those spent in hooks."""
    units, within = list(_reshard_units(model).values()), list[float]()
    for parameter in model.parameters():
        shard = parameter._local_tensor  # type: ignore[attr-defined]
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            if hasattr(shard, name):
                setattr(shard, name, _time_hook(getattr(shard, name), within))
    taken = []
    for _ in range(rounds):
        # All ranks start together, or one would measure its wait for another.
        _synchronize_gpu()
        dist.barrier()
        within.clear()
        start = time.perf_counter()
        for unit in units:
            unit.unshard()
            unit.reshard()
        _synchronize_gpu()
        taken.append((1e3 * (time.perf_counter() - start), 1e3 * sum(within)))
    return min(taken)


def _time_hook(hook: Callable[..., Any], within: list[float]) -> Callable[..., Any]:
    # FSDP2 chooses its arguments by the hook's signature.
    @functools.wraps(hook)
    def call_and_time(*args: Any, **kwargs: Any) -> Any:
        _synchronize_gpu()
        start = time.perf_counter()
        answer = hook(*args, **kwargs)
        _synchronize_gpu()
        within.append(time.perf_counter() - start)
        return answer

    return call_and_time


def _synchronize_gpu() -> None:
    # Asking whether there is a GPU would start its runtime, also for ranks on the CPU.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
