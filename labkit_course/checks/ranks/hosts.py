"""Ask every rank whether all stop, when some of them are asked to; or shard a model over hosts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit import torch_private
from labkit.session.counted_group import GroupTraffic

CASES = ("nobody", "rank 0", "the last rank", "everybody")
BLOCKS, WIDTH, ROWS = 3, 6, 2


def run_answer(answer: Callable[..., Any], what: str = "stop", ranks: int = 0) -> dict[str, Any]:
    """Return what the answer says in each case; the name of its type where that is no bool.

    For "shard" return ``run_sharding``, with so many ranks on each host.
    """
    if what == "shard":
        return run_sharding(answer, ranks)
    last = dist.get_world_size() - 1
    is_asked = {"nobody": [], "rank 0": [0], "the last rank": [last], "everybody": range(last + 1)}
    found = [answer(dist.get_rank() in is_asked[case]) for case in CASES]
    return {"stops": [_as_bool(each) for each in found]}


def _as_bool(value: Any) -> bool | str:
    is_one = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return bool(value) if is_one else type(value).__name__


def run_sharding(answer: Callable[..., Any], ranks: int) -> dict[str, Any]:
    """Let the answer shard a small model, and train a step.

    Return how many ``parameters`` the model has and this rank ``held``, how many ``blocks`` it has
    and how many ``gathers`` the forward pass made, how many calls of each collective were
    ``crossing`` hosts, and which gradients are ``wrong``.
    """
    model, reference = make_network(), make_network()
    answer(model, dist.get_world_size() // ranks, ranks)
    held = sum(_local(parameter).numel() for parameter in model.parameters())
    with GroupTraffic() as forward:
        output = model(rank_batch(dist.get_rank()))
    with GroupTraffic() as backward:
        output.square().mean().backward()
    groups = torch_private.world.pg_names.items()
    members = {str(name): dist.get_process_group_ranks(group) for group, name in groups}
    crossing = Counter(
        each.name
        for each in (*forward.calls(), *backward.calls())
        if len({rank // ranks for rank in members.get(each.group, ())}) > 1
    )
    everyone = torch.cat([rank_batch(rank) for rank in range(dist.get_world_size())])
    reference(everyone).square().mean().backward()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    wrong = [name for (name, mine), whole in pairs if not _is_close(mine.grad, whole.grad)]
    return {
        "parameters": sum(parameter.numel() for parameter in reference.parameters()),
        "held": held,
        "blocks": BLOCKS,
        "gathers": forward.counts().get("all_gather", 0),
        "crossing": {kind: crossing[kind] for kind in ("all_gather", "reduce_scatter")},
        "wrong": wrong,
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_close(mine: Tensor | None, whole: Tensor | None) -> bool:
    assert whole is not None
    if isinstance(mine, DTensor):
        mine = mine.full_tensor()
    return mine is not None and torch.allclose(mine, whole, rtol=1e-4, atol=1e-6)


def make_network() -> nn.Sequential:
    """Return the same network on every rank: blocks whose rows any few ranks can share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        return nn.Sequential(*blocks)


def rank_batch(index: int) -> Tensor:
    """Return a rank's inputs."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
