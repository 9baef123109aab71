"""A rank program: puts a model on a 2 x 2 mesh with a learner's plan, and holds it against one device.

Ranks along ``tp`` share the matrices as the plan says; ranks along ``dp`` take their own samples, and FSDP shards what
each holds. Output, gradients, what a rank holds and what it sends along ``tp`` are looked at, in this order.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, parallel
from torch.nn import functional

from labkit import rank
from labkit.meter import CommunicationCounter
from labkit.models.mlp import MLPStack
from labkit.models.protocol import LabModel, seeded_normal

DIM, BATCH, PLACES = 8, 4, 8


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


@dataclass
class Config:
    """Whose plan, and for what."""

    answer: str = ""
    """File with the source of the learner's function."""
    name: str = "plan"
    """Name of the function in it."""
    model: Literal["gated", "stack"] = "gated"
    """What the plan is for."""
    most_sent: int = 0
    """Collectives that a step may run along tp; 0 for any number."""


class Wrong(Exception):
    """The answer is wrong; the message is for the learner."""


def main(config: Config) -> None:
    """Call the answer once, train one step with its plan, and compare."""
    with rank.session() as here:
        warnings.simplefilter("ignore")  # a wrong plan makes torch warn, and here the verdict is what counts
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        names: dict[str, Any] = {name: getattr(parallel, name) for name in parallel.__all__}
        names |= {name: getattr(dtensor, name) for name in ("Replicate", "Shard", "Partial")} | {"torch": torch}
        exec(compile(Path(config.answer).read_text(), config.answer, "exec"), names)
        judge(names[config.name](), config.model, here.mesh(dp=2, tp=2), config.most_sent)


def judge(plan: Any, model_name: str, mesh: DeviceMesh, most_sent: int) -> None:
    """Raise Wrong for the first thing that is not right with a plan. A collective."""
    reference, model = build(model_name), build(model_name)
    refuse_what_is_no_plan(plan, model)
    place, cpu = mesh["dp"].get_local_rank(), torch.device("cpu")
    lines = [reference.get_input(cpu, seed) for seed in range(mesh["dp"].size())]
    for line in lines:
        (reference.get_loss(line, reference(*line)) / len(lines)).backward()
    axes = {str(mesh.get_group("tp").group_name): "tp"}
    try:
        parallel.parallelize_module(model, mesh["tp"], plan)
        held = {name: local(parameter).numel() for name, parameter in model.named_parameters()}
        fully_shard(model, mesh=mesh["dp"])
        with CommunicationCounter(axes) as counter:
            output = local(model(*lines[place]))
            compare_output(output, reference(*lines[place]))
            reference.get_loss(lines[place], output).backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise Wrong(f"the model does not run with this plan: {first_line(error)}") from error
    compare_gradients(model, reference)
    refuse_what_is_whole(held, reference)
    refuse_too_many({name: count for name, count in counter.counts.items() if name.startswith("tp/")}, most_sent)


def build(name: str) -> LabModel:
    """The model that a plan is for, equal every time."""
    torch.manual_seed(0)
    return GatedMLP(DIM, 4 * DIM) if name == "gated" else MLPStack(DIM, batch=BATCH)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_line(error: Exception) -> str:
    """What went wrong, short."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def refuse_what_is_no_plan(plan: Any, model: nn.Module) -> None:
    """Raise Wrong unless this is a dict from names of linear layers to ways to cut them."""
    if not isinstance(plan, dict):
        raise Wrong(f"the plan is {plan!r}, not a dict such as {{'up': ColwiseParallel()}}")
    there = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, style in plan.items():
        if name not in there:
            raise Wrong(f"there is no linear layer {name!r}: there are {', '.join(there)}")
        if not isinstance(style, parallel.ParallelStyle):
            raise Wrong(f"{name} is to be {style!r}: write ColwiseParallel() or RowwiseParallel()")


def compare_output(got: Tensor, expected: Tensor) -> None:
    """Raise Wrong where the output differs from one device's."""
    if got.shape != expected.shape:
        raise Wrong(f"the output has shape {list(got.shape)}, on one device it is {list(expected.shape)}")
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
        raise Wrong("the output is not one device's, and nothing has raised an error")


def compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Raise Wrong, naming the parameters, where gradients differ from one device's. A collective."""
    wrong: Counter[str] = Counter()
    names = []
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert expected.grad is not None
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if whole is None or not torch.allclose(whole, expected.grad, rtol=1e-4, atol=1e-6):
            wrong[describe(whole, expected.grad)] += 1
            names.append(name)
    if names:
        shown = ", ".join(names[:2]) + (f" and of {len(names) - 2} more" if len(names) > 2 else "")
        raise Wrong(
            f"the output is right, but the gradient of {shown} {wrong.most_common(1)[0][0]}: a layout in the plan says "
            f"something about a tensor that is not so"
        )


def describe(got: Tensor | None, expected: Tensor) -> str:
    """What a wrong gradient looks like."""
    if got is None:
        return "is missing"
    ratio = (got * expected).sum() / (expected * expected).sum()
    if torch.allclose(got, ratio * expected, rtol=1e-3, atol=1e-6):
        return f"is {ratio:.3g} times one device's"
    return "is not one device's"


def refuse_what_is_whole(held: dict[str, int], reference: nn.Module) -> None:
    """Raise Wrong where a rank of tp holds a matrix as a whole."""
    whole = [name for name, p in reference.named_parameters() if p.dim() > 1 and held[name] == p.numel()]
    if whole:
        raise Wrong(f"every rank holds all of {', '.join(whole)}: nothing is shared out there")


def refuse_too_many(sent: dict[str, int], most: int) -> None:
    """Raise Wrong where a step runs more collectives along tp than it needs to."""
    if most and sum(sent.values()) > most:
        seen = ", ".join(f"{count} {name.removeprefix('tp/')}" for name, count in sorted(sent.items()))
        raise Wrong(
            f"the result is right, but a step sends more than it needs to along tp: {seen}, where {most} will do"
        )


if __name__ == "__main__":
    rank.start(main, Config)
