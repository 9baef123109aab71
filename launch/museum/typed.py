"""Ask the package spmd_types about a room's step, without a rank: a second judge beside parity.

    pip install spmd_types
    python -m launch.museum.typed      # what the types say of each room as published

Every tensor is declared to be one of these over the ranks, and each operation has its rule:

    replicate   the same on all ranks; each rank's gradient is a term of the whole one
    invariant   the same on all ranks, and so is its gradient
    varying     a share, or a rank's own
    partial     a term of the sum over the ranks

The step runs on one process as rank 0 of two, on torch's fake group, and its collectives are those
of spmd_types. Its backward pass is not run: a gradient gets the type that belongs to its weight's,
and what the step does with gradients is checked, too. At the end the gradient of a whole weight has
to be the same on all ranks.
"""

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import torch_private
from launch import museum
from launch.museum.parts import Weights, draw_weights
from launch.museum.visit import Step, share

RANKS, AXIS = 2, "ranks"
# Every rank of these computes on all inputs, so whole tensors are invariant. In the other rooms a
# rank has its share of the inputs, and the step itself adds up the gradients of whole weights.
ALL_INPUTS = ("tokens", "router", "smoothing", "clip", "tied", "scale")


def declare(name: str) -> dict[str, str]:
    """Return the types of a room's inputs and weights: R, I, or V."""
    room = museum.open_room(name)
    whole = "I" if name in ALL_INPUTS else "R"
    kinds = {each: "V" if each in museum.cut_weights(name) else whole for each in room.SHAPES}
    return {"inputs": whole, **kinds}


def ask_types(
    name: str, step: Step | None = None, declared: Mapping[str, str] | None = None
) -> str | None:
    """Return "" if the types accept a room's step, by default as published, else their complaint.

    It is None if they have no rule for one of the step's collectives. ``declared`` is what
    ``declare`` returns, or a declaration of your own.

    Raises:
        ImportError: spmd_types is not installed.
    """
    spmd: Any = importlib.import_module("spmd_types")
    checker: Any = importlib.import_module("spmd_types.checker")
    room, kinds = museum.open_room(name), {**declare(name), **(declared or {})}
    step = step or room.step
    with _fake_group() as mesh, spmd.set_current_mesh(mesh):
        weights: Weights = {}
        for each, numbers in draw_weights(room.SHAPES).items():
            own = share(room, each, numbers, 0, RANKS)
            if own is not None:
                kind = getattr(spmd, kinds[each])
                weights[each] = spmd.assert_type(own.clone().requires_grad_(), {AXIS: kind})
        kind = getattr(spmd, kinds["inputs"])
        inputs, targets = (spmd.assert_type(each, {AXIS: kind}) for each in room.batch(0))
        with (
            warnings.catch_warnings(),
            checker.typecheck("permissive"),
            _typed_calls(spmd, step, weights),
        ):
            # spmd_types calls functional collectives by names that torch is about to change.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                step(dict(weights), inputs, targets)
            except spmd.SpmdTypeError as error:
                complaint = str(error).strip().splitlines()[0]
                short = re.split(r"\. | \(| -- ", complaint)[0].replace(" on axis default_pg", "")
                return None if "not yet implemented" in complaint else short
            except Exception as error:
                return f"the step raises {type(error).__name__}"
        for each, weight in weights.items():
            if weight.grad is None:
                return f"{each} has no gradient"
            kind = spmd.get_axis_local_type(weight.grad, mesh.get_group(AXIS))
            if each not in room.HELD and kind is not spmd.R:
                return f"the gradient of {each} is {kind.name}, not R"
    return ""


def verdict(name: str, step: Step | None = None, declared: Mapping[str, str] | None = None) -> str:
    """Return what the types say of a step in words, also where the package is missing."""
    if importlib.util.find_spec("spmd_types") is None:
        return "not asked, because spmd_types is not installed"
    said = ask_types(name, step, declared)
    return "no rule" if said is None else said or "accepted"


def ask_all(steps: Mapping[str, Step] | None = None) -> dict[str, str | None]:
    """Return what the types say of these steps, by default of all rooms as published.

    None stands for no verdict; all are None if spmd_types is not installed.
    """
    asked: dict[str, Any] = {**(steps or dict.fromkeys(museum.ROOMS))}
    if importlib.util.find_spec("spmd_types") is None:
        print("the types are not asked: pip install spmd_types")
        return dict.fromkeys(asked)
    return {name: ask_types(name, step) for name, step in asked.items()}


@contextmanager
def _fake_group() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=torch_private.FakeStore())
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=(AXIS,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _typed_calls(spmd: Any, step: Step, weights: Weights) -> Iterator[None]:
    """Let the step call spmd_types where it would call collectives of torch or of ``parts``."""
    group = dist.group.WORLD

    def typed(numbers: Tensor, kind: Any) -> Tensor:
        with spmd.no_typecheck():
            return spmd.assert_type(numbers.detach().clone(), {AXIS: kind})

    def all_reduce(tensor: Tensor, async_op: bool = False, **options: Any) -> Any:
        # A rank's own numbers become terms of the sum, as in spmd_types' own all_reduce.
        if spmd.maybe_get_axis_local_type(tensor, group) is spmd.V:
            spmd.mutate_type(tensor, group, src=spmd.V, dst=spmd.P)
        real_all_reduce(tensor)
        return mock.Mock() if async_op else None

    def all_gather(tensors: list[Tensor], own: Tensor) -> None:
        for place, each in enumerate(tensors):
            tensors[place] = typed(each, spmd.R)
        real_all_gather(tensors, own)

    def backward(loss: Tensor, gradient: Tensor | None = None) -> None:
        kinds = {spmd.I: spmd.R, spmd.R: spmd.P, spmd.V: spmd.V}
        for weight in weights.values():
            new = typed(torch.zeros_like(weight), kinds[spmd.get_axis_local_type(weight, group)])
            weight.grad = new if weight.grad is None else weight.grad + new

    def read_gradient(weight: Tensor) -> Any:
        # An attribute is no operation, though the checker takes it for one.
        with spmd.no_typecheck():
            return plain_gradient.__get__(weight)

    def set_gradient(weight: Tensor, gradient: Tensor | None) -> None:
        with spmd.no_typecheck():
            plain_gradient.__set__(weight, gradient)

    real_all_reduce, real_all_gather = dist.all_reduce, dist.all_gather
    plain_gradient: Any = Tensor.grad
    names: dict[str, Callable[..., Any]] = {
        "part": lambda whole, dim=0: typed(whole.chunk(RANKS, dim)[0], spmd.V),
        "total": lambda loss: typed(torch.zeros(()), spmd.R),
        "copy_to_ranks": lambda x: spmd.invariant_to_replicate(x, group),
        "sum_over_ranks": lambda x: spmd.all_reduce(x, group, src=spmd.V, dst=spmd.I),
        "gather_from_ranks": lambda x: spmd.all_gather(x, group, src=spmd.S(0), dst=spmd.R),
        "sum_and_share": lambda x: spmd.reduce_scatter(x, group, src=spmd.V, dst=spmd.S(0)),
    }
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(step.__globals__, names))
        patches.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        patches.enter_context(mock.patch.object(dist, "all_gather", all_gather))
        patches.enter_context(mock.patch.object(Tensor, "backward", backward))
        attribute = property(read_gradient, set_gradient)
        patches.enter_context(mock.patch.object(Tensor, "grad", attribute))
        yield


def main() -> None:
    """Print what the types say of each room."""
    for name in museum.ROOMS:
        print(f"{name:12} {verdict(name)}")


if __name__ == "__main__":
    main()
