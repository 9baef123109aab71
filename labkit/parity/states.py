"""Compare a distributed model with a whole one, or its ranks with each other, and copy its state.

These are for tests, and have names as in torch's FSDP tests. ``check_sharded_parity`` says which
parameter is wrong on which rank; ``comparison.Parity``, which the labs use, gathers first and gives
one number for all.
"""

import contextlib
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Placement

from labkit.parallel.checkpointing import plain_name
from labkit.parity.comparison import local_shard, to_full_tensor
from labkit.parity.one_device import cast_floats


def check_sharded_parity(
    replicated: nn.Module, sharded: nn.Module, prefixes_to_ignore: Sequence[str] = ()
) -> int:
    """Compare this rank's shard of every parameter and gradient with the same part of a whole one.

    Returns the number of tensors compared. Raises AssertionError for a difference in names, values
    or gradients, and ValueError where nothing can be compared. Wrappers add the prefixes to the
    sharded names, such as ``"_checkpoint_wrapped_module."``.
    """
    wholes, shards = dict(replicated.named_parameters()), {}
    for name, parameter in sharded.named_parameters():
        for prefix in prefixes_to_ignore:
            name = name.replace(prefix, "")
        shards[name] = parameter
    if list(wholes) != list(shards):
        differing = sorted(wholes.keys() ^ shards.keys()) or "the order alone differs"
        what = "the names of the replicated and the sharded parameters differ"
        raise AssertionError(f"{what}: {differing}")
    if not wholes:
        raise ValueError(f"nothing to compare: {type(replicated).__name__} has no parameters")
    compared = 0
    for name, whole in wholes.items():
        shard: Tensor = shards[name]
        if not isinstance(shard, DTensor):
            raise ValueError(f"{name} is a plain tensor, not a shard: shard the model first")
        _refuse_ambiguous(name, shard.placements)
        if (shard.grad is None) != (whole.grad is None):
            missing = "sharded" if shard.grad is None else "replicated"
            raise AssertionError(f"{name}: only the {missing} module has no gradient")
        pairs = {"parameter": (shard, whole.detach()), "gradient of": (shard.grad, whole.grad)}
        for what, (actual, expected) in pairs.items():
            if actual is None or expected is None:
                continue
            if not isinstance(actual, DTensor) or actual.placements != shard.placements:
                placed = getattr(actual, "placements", "a plain tensor")
                rule = f"placed as {placed}, and its parameter as {shard.placements}"
                raise AssertionError(f"{what} {name}: {rule}")
            _compare_shard(f"{what} {name}", actual, expected)
            compared += 1
    return compared


def _compare_shard(what: str, actual: DTensor, expected: Tensor) -> None:
    """Raise AssertionError unless this rank's shard equals the same part of ``expected``."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
    where = f"{what}, the shard of rank {dist.get_rank()}"
    part = local_shard(expected, actual)
    torch.testing.assert_close(actual.to_local(), part, msg=lambda text: f"{where}: {text}")


def _refuse_ambiguous(name: str, placements: Sequence[Placement]) -> None:
    # torch's private placement for such shards is no Shard, but has a dim too.
    dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
    if len(set(dims)) < len(dims):
        # FSDP over tensor parallelism cuts the last axis first, distribute_tensor the first axis.
        rule = "which one cut first decides which rows a rank holds"
        fix = "gather instead, parity.Parity compares whole tensors"
        raise ValueError(
            f"{name}: two mesh axes shard the same dim, {tuple(placements)}; {rule}: {fix}"
        )


def assert_module_states(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    assert_fn: Callable[[Tensor, Tensor], object] | None = None,
) -> None:
    """Assert that parameters and buffers are equal, bit for bit, on all ranks. A collective.

    It sends 32 bytes a tensor. The error names the first that differs, and which ranks agree.
    With ``assert_fn``, such as ``torch.testing.assert_close``, it sends all tensors, and calls the
    function with each tensor of rank 0 and that of every other rank.
    """
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    states = {name: _plain_copy(name, tensor) for name, tensor in states.items()}
    # Ranks send digests, so that they need not send the tensors themselves.
    mine = {name: _tensor_digest(tensor) for name, tensor in states.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    names = list(dict.fromkeys(name for digests in everyone for name in digests))
    if not names:
        what = f"{type(model).__name__} has neither parameters nor buffers"
        raise ValueError(f"nothing to compare: {what}")
    for name in names:
        holders = defaultdict(list)
        for rank, digests in enumerate(everyone):
            holders[digests.get(name)].append(str(rank))
        if len(holders) > 1 and (assert_fn is None or None in holders):
            camps = []
            for digest, ranks in holders.items():
                who = f"ranks {', '.join(ranks)} hold" if ranks[1:] else f"rank {ranks[0]} holds"
                camps.append(f"{who} {'one value' if digest else 'none'}")
            raise AssertionError(f"{name} differs between ranks: {'; '.join(camps)}")
    if assert_fn is not None:
        dist.all_gather_object(everyone, states, group=group)
        for name, rank in itertools.product(names, range(1, len(everyone))):
            try:
                assert_fn(everyone[0][name], everyone[rank][name])
            except AssertionError as error:
                raise AssertionError(f"{name}, ranks 0 and {rank}: {error}") from error


def _plain_copy(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor, or what every rank has of a replicated DTensor, in host memory."""
    if isinstance(tensor, DTensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            where = f"a shard, {tensor.placements}"
            raise ValueError(f"{name} is {where}: it differs between ranks by design")
        tensor = tensor.to_local()
    return tensor.detach().cpu()


def _tensor_digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's dtype, shape and bits."""
    plain = tensor.contiguous().reshape(-1)
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + plain.view(torch.uint8).numpy().tobytes()).digest()


def zero_model(model: nn.Module, zero_buffers: bool = False, *, summon_full: bool = True) -> None:
    """Set every parameter to zero in place, and the buffers if asked. With FSDP1 a collective.

    Without ``summon_full`` nothing is gathered: each rank sets what it holds at the moment.
    """
    _reshard_modules(model)
    whole = FSDP1.summon_full_params(model) if summon_full else contextlib.nullcontext()
    with torch.no_grad(), whole:
        for tensor in [*model.parameters(), *(model.buffers() if zero_buffers else ())]:
            tensor.zero_()


def full_params(model: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return copies of all whole parameters by name, without the prefixes of wrappers.

    A collective for a sharded model; FSDP1 must have ``use_orig_params``. Without ``recurse`` the
    parameters of nested units are neither gathered nor returned.
    """
    _reshard_modules(model)
    units = [module for module in model.modules() if isinstance(module, FSDP1 | FSDPModule)]
    nested = [] if recurse else [unit for unit in units if unit is not model]
    with torch.no_grad(), FSDP1.summon_full_params(model, recurse=recurse, writeback=False):
        left_out = {id(parameter) for unit in nested for parameter in unit.parameters()}
        named = [item for item in model.named_parameters() if id(item[1]) not in left_out]
        return {plain_name(name): to_full_tensor(each.detach()).clone() for name, each in named}


def _reshard_modules(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 kept after a forward pass."""
    # These are copies, perhaps in another dtype. A change of them would be lost.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def broadcast_state_dict(
    state: Mapping[str, Tensor] | None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return rank 0's state dict, of whole tensors, on every rank's ``device``. A collective."""
    # Either rank 0's state, or its error, which every rank raises.
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        shards = [name for name, tensor in (state or {}).items() if isinstance(tensor, DTensor)]
        if state is None:
            box = ["rank 0 has no state"]
        elif shards:
            box = [f"{shards[0]} is a shard: gather it first, with full_params"]
        else:
            box = [{name: tensor.detach().cpu() for name, tensor in state.items()}]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], str):
        raise ValueError(f"cannot broadcast a state dict: {box[0]}")
    return {name: tensor.to(device) for name, tensor in box[0].items()}


def copy_state_dict(
    model: nn.Module, cpu_offload: bool = False, half: bool = False
) -> dict[str, Tensor]:
    """Return a copy of the model's state dict, if asked in host memory and in float16.

    FSDP2's copy holds shards; FSDP1's is a collective.
    """
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if half:
        copies = {name: cast_floats(tensor, torch.float16) for name, tensor in copies.items()}
    return {name: tensor.cpu() for name, tensor in copies.items()} if cpu_offload else copies
