"""On a rank: a model on a 2 x 2 mesh, put there by a learner's plan, trains one step.

Ranks along ``tp`` share the matrices as the plan says; ranks along ``data`` take their own samples, and FSDP shards
what each holds.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, parallel
from torch.nn import functional

from labkit.checks.ask import Wrong, in_short, shown
from labkit.models.mlp import MLPStack
from labkit.models.protocol import LabModel, seeded_normal
from labkit.rank.traffic import CommunicationCounter

DIM, BATCH, PLACES = 8, 4, 8
DATA, TP = 2, 2


class GatedMLP(LabModel):
    """An MLP as language models have it: one layer opens and closes the other's features. [N, S, D] to the same."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """[4, 8, 8]."""
        return (seeded_normal(BATCH, PLACES, DIM, device=device, seed=seed),)


def feed(answer: Callable[[], Any], model: str) -> dict[str, Any]:
    """Train one step with the plan that the answer gives for a model, "gated" or "stack".

    Returns:
        ``data``, this rank's place along that axis; ``held``, numbers of each parameter along tp, before FSDP; then
        ``output``, ``gradients`` as a whole by parameter, and ``sent``, collectives along tp by name, as far as the
        model runs; ``error``, what stopped it.

    Raises:
        Wrong: the answer gives no plan for this model.
    """
    warnings.simplefilter("ignore")  # a wrong plan makes torch warn, and here the verdict is what counts
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (DATA, TP), mesh_dim_names=("data", "tp"))
    cut, plan, place = build(model), answer(), mesh["data"].get_local_rank()
    refuse_what_is_no_plan(plan, cut)
    line = cut.get_input(torch.device("cpu"), seed=place)
    found: dict[str, Any] = {"data": place}
    try:
        parallel.parallelize_module(cut, mesh["tp"], plan)
        found["held"] = {name: local(parameter).numel() for name, parameter in cut.named_parameters()}
        fully_shard(cut, mesh=mesh["data"])
        with CommunicationCounter(mesh) as counter:
            output = local(cut(*line))
            found["output"] = output.detach().clone()
            cut.get_loss(line, output).backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        return found | {"error": in_short(error).splitlines()[0]}
    gradients: dict[str, Any] = {name: each.grad for name, each in cut.named_parameters()}
    for name, gradient in gradients.items():
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found | {"gradients": gradients, "sent": dict(counter.along["tp"].counts)}


def build(name: str) -> LabModel:
    """The model that a plan is for, equal every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GatedMLP(DIM, 4 * DIM) if name == "gated" else MLPStack(DIM, batch=BATCH)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def refuse_what_is_no_plan(plan: Any, model: nn.Module) -> None:
    """Raise Wrong unless this is a dict from names of linear layers to ways to cut them."""
    if not isinstance(plan, dict):
        raise Wrong(f"the plan is {shown(plan)}, not a dict such as {{'up': ColwiseParallel()}}")
    there = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, style in plan.items():
        if name not in there:
            raise Wrong(f"there is no linear layer {shown(name)}: there are {', '.join(there)}")
        if not isinstance(style, parallel.ParallelStyle):
            raise Wrong(f"{name} is to be {shown(style)}: write ColwiseParallel() or RowwiseParallel()")
