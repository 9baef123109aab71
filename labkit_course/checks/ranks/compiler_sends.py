"""Run a learner's functions that gather a DTensor, and that shard a small model."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from labkit.parallel.simple_fsdp import gather
from labkit.session.counted_group import GroupTraffic

# Of the second parameter the ranks hold different numbers of rows.
SHAPES = (6, 3), (5, 2)
WIDTHS = (6, 12, 6)
ROWS = 3


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Return results of ``run_gather`` for "gather", of ``run_model`` for "model"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return run_gather(answer, mesh) if what == "gather" else run_model(answer, mesh)


def run_gather(answer: Callable[[DTensor], Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Let the answer gather two parameters and backpropagate through it.

    Return for each the ``kinds`` of what it returned, the ``wholes`` where they are plain tensors,
    the ``gradients`` of this rank's rows, and calls and bytes sent ``forward`` and ``backward``.
    """
    found: dict[str, Any] = {"kinds": [], "wholes": [], "gradients": []}
    found |= {"forward": [], "backward": []}
    for shape in SHAPES:
        rows = nn.Parameter(distribute_tensor(whole_parameter(shape), mesh, [Shard(0)]))
        with GroupTraffic() as forward:
            whole: Any = answer(cast(DTensor, rows))
        found["kinds"].append(type(whole).__name__)
        if type(whole) is not Tensor:
            return found
        found["wholes"].append(whole.detach().clone())
        with GroupTraffic() as backward:
            if whole.requires_grad and whole.shape == shape:
                (whole * rank_gradient(shape, dist.get_rank())).sum().backward()
        found["gradients"].append(local_gradient(rows))
        found["forward"].append(forward.totals())
        found["backward"].append(backward.totals())
    return found


def run_model(answer: Callable[..., Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Let the answer shard a model, and run both passes.

    Return the names of its parameters ``after``, those that are ``whole`` still, whether the class
    of all layers was changed, ``shared``, how many elements this rank has ``held``, the ``output``,
    the ``gradients`` of this rank's rows, and calls and bytes ``sent``.
    """
    model = make_model()
    answer(model, mesh, gather)
    named = dict(model.named_parameters())
    found: dict[str, Any] = {"after": list(named), "shared": "weight" in vars(nn.Linear)}
    if found["shared"]:
        # Every layer of this process would have it.
        for name in ("weight", "bias"):
            delattr(nn.Linear, name)
        return found
    found["whole"] = [name for name, each in named.items() if not isinstance(each, DTensor)]
    if found["whole"]:
        return found
    found["held"] = sum(cast(DTensor, each).to_local().numel() for each in named.values())
    with GroupTraffic() as traffic:
        output = model(rank_batch(dist.get_rank()))
        output.square().mean().backward()
    found["output"] = output.detach()
    found["gradients"] = {name: local_gradient(each) for name, each in named.items()}
    found["sent"] = traffic.totals()
    return found


def whole_parameter(shape: tuple[int, ...]) -> Tensor:
    """Return a parameter, the same on every rank."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def rank_gradient(shape: tuple[int, ...], rank: int) -> Tensor:
    """Return the gradient that a rank has for a whole parameter."""
    return (rank + 1) * (whole_parameter(shape) + 1)


def local_gradient(rows: nn.Parameter) -> Tensor | None:
    """Return the gradient of this rank's rows, or None."""
    gradient = rows.grad
    return gradient.to_local().clone() if isinstance(gradient, DTensor) else gradient


def make_model() -> nn.Sequential:
    """Return two linear layers with ReLU, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second, third = WIDTHS
        return nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third))


def rank_batch(rank: int) -> Tensor:
    """Return the samples of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTHS[0], generator=generator)
