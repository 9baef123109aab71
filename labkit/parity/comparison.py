"""Compare the tensors of a distributed run with one device's, and count what was compared."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import plain_name
from labkit.torch_private import keystr, tree_flatten_with_path, tree_leaves

ModelType = TypeVar("ModelType", bound=nn.Module)
TensorKind = Literal["gradient", "parameter", "buffer"]
NamedTensors = Mapping[str, Tensor | None]
# The largest relative error that is still right, by the shortest type on the way. Ranks add in
# another order than one device. In float32 that changes the last of 24 bits, and layers and steps
# carry it on; bfloat16 rounds to 1 part in 256, float16 to 1 in 2048.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# What gradients kept in a type may differ by whatever their size: float16 knows no number between
# 0 and 2^-24, and a small gradient is rounded to such steps on both sides.
FLOORS = {torch.float16: 2.0**-23}


@dataclass
class Parity:
    """A running comparison: how many tensors, the largest relative error, and the worst tensor."""

    compared: int = 0
    max_rel_error: float = 0.0
    worst: str = ""
    # Of the reference. Two zeros are equal whatever went wrong before.
    gradients: int = 0
    zero_gradients: int = 0
    # Differences up to this one count as none.
    floor: float = 0.0

    def compare_tensor(self, name: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Compare one tensor. A DTensor is gathered, so all ranks need the same order."""
        if actual is None or expected is None:
            missing = "distributed" if actual is None else "single-device"
            raise ValueError(f"{name}: the {missing} side has none to compare")
        actual, expected = to_full_tensor(actual), to_full_tensor(expected)
        if actual.shape != expected.shape:
            raise ValueError(f"{name}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
        error = relative_error(actual, expected, self.floor)
        self.compared += 1
        # An error that is nan once stays nan.
        if math.isnan(error) or error > self.max_rel_error:
            self.max_rel_error, self.worst = error, name

    def compare_leaves(self, name: str, actual: Any, expected: Any) -> None:
        """Compare two outputs of any structure, such as a dict of tensors, leaf by leaf."""
        left, structure = tree_flatten_with_path(actual)
        right, wanted = tree_flatten_with_path(expected)
        if structure != wanted:
            raise ValueError(f"{name}: structure {structure} is not {wanted}")
        if not count_leaves(expected):
            raise ValueError(f"{name} holds no tensor to compare")
        for (path, leaf), (_, other) in zip(left, right, strict=True):
            if isinstance(other, Tensor):
                self.compare_tensor(f"{name}{keystr(path)}", leaf.detach(), other.detach())

    def compare_named(self, prefix: str, actual: NamedTensors, expected: NamedTensors) -> None:
        """Compare tensors by name; both sides must have the same names."""
        if one_sided := sorted(actual.keys() ^ expected.keys()):
            raise ValueError(f"{prefix}: only on one side: {one_sided}")
        for name, tensor in actual.items():
            self.compare_tensor(f"{prefix} {name}", tensor, expected[name])

    def compare_steps(
        self, name: str, actual: Sequence[NamedTensors], expected: Sequence[NamedTensors]
    ) -> None:
        """Compare the tensors that each training step left."""
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            self.compare_named(f"{name}, step {index},", left, right)

    def compare_models(
        self, actual: nn.Module, expected: nn.Module, what: TensorKind, *, some_zeros: bool = False
    ) -> None:
        """Compare the tensors of one kind in two models, and count the gradients."""
        left, right = tensors_by_name(actual, what), tensors_by_name(expected, what)
        if what == "gradient":
            self.count_gradients(expected, some_zeros=some_zeros)
            for name in sorted(find_unused_parameters(expected)):
                if _has_values(left.pop(name, None)):
                    raise ValueError(f"the model does not use {name}, which must have no gradient")
                right.pop(name, None)
        self.compare_named(what, left, right)

    def count_gradients(self, reference: nn.Module, *, some_zeros: bool = False) -> None:
        """Count the gradients of the parameters that a model uses, and those that are all zeros."""
        gradients = tensors_by_name(reference, "gradient")
        used = gradients.keys() - find_unused_parameters(reference)
        zeros = [not _has_values(gradients[name]) for name in used]
        self.gradients += len(zeros)
        # Where samples may skip a block, zeros are wrong only if all gradients are zeros.
        self.zero_gradients += sum(zeros) if all(zeros) or not some_zeros else 0

    def largest_error(self) -> tuple[float, str]:
        """Return the largest relative error on any rank, and its tensor's name. A collective."""
        everyone = [(self.max_rel_error, self.worst)]
        if dist.is_initialized():
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, everyone[0])
        return max(everyone, key=lambda pair: (math.isnan(pair[0]), pair[0]))

    def verdict(self, limit: float, expected: int) -> dict[str, Any]:
        """Return the result over all ranks, for ``Session.finish_check``. A collective."""
        error, worst = self.largest_error()
        alive = self.gradients > 0 and self.zero_gradients == 0
        return {
            "check": "parity",
            "compared": self.compared,
            "expected": expected,
            "max_rel_error": error,
            "limit": limit,
            "worst": worst,
            "gradients_alive": alive,
            # ``expected`` was counted apart from the loop that compared.
            "ok": 0 < self.compared == expected and error <= limit and alive,
        }


def _has_values(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


def tensors_by_name(model: nn.Module, what: TensorKind) -> dict[str, Tensor | None]:
    """Return a model's tensors of one kind by name; a trained parameter may lack its gradient."""
    if what == "buffer":
        return {plain_name(name): buffer for name, buffer in model.named_buffers()}
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    if what == "parameter":
        return {name: parameter.detach() for name, parameter in named.items()}
    return {name: each.grad for name, each in named.items() if each.requires_grad}


def clone_tensors(model: nn.Module, *kinds: TensorKind) -> dict[str, Tensor]:
    """Return copies of the tensors that a model has, by name, such as ``gradient fc1.weight``."""
    return {
        f"{what} {name}": tensor.clone()
        for what in kinds
        for name, tensor in tensors_by_name(model, what).items()
        if tensor is not None
    }


def find_unused_parameters(model: nn.Module) -> set[str]:
    """Return the names of trained parameters that a LabModel leaves out of its forward pass."""
    unused = model.unused_modules() if isinstance(model, LabModel) else []
    numbers = {id(parameter) for module in unused for parameter in module.parameters()}
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return {plain_name(name) for name, each in trained if id(each) in numbers}


def count_tensors(model: nn.Module, *kinds: TensorKind) -> int:
    """Return how many tensors of these kinds a comparison of ``model`` has to look at."""
    unused = len(find_unused_parameters(model)) if "gradient" in kinds else 0
    return sum(len(tensors_by_name(model, what)) for what in kinds) - unused


def count_leaves(output: Any) -> int:
    """Return how many tensors there are in an output of any structure."""
    return sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output))


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return a plain tensor with all shards of a DTensor (a collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like ``like``."""
    # Cut it from this rank's own tensor; torch's default would send rank 0's.
    placed = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local()


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference beyond ``floor`` over the largest absolute value expected."""
    # Offloaded parameters are on the CPU, those of one device on the GPU.
    actual, expected = actual.to(expected.device).double(), expected.double()
    # So one number serves weights, gradients and outputs of any scale.
    difference = ((actual - expected).abs().max() - floor).clamp(min=0).item()
    scale = expected.abs().max().item()
    if difference == 0 and not math.isnan(scale):
        return 0.0
    return difference / scale if scale else math.inf


def seed_and_copy(model: ModelType, seed: int) -> ModelType:
    """Make a model's parameters non-degenerate, and return a copy for comparison."""
    seed_parameters(model, seed)
    return copy.deepcopy(model)


def seed_parameters(model: nn.Module, seed: int) -> None:
    """Add seeded noise to every parameter: no two channels are equal, and no bias is neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.add_(noise.to(parameter.device))
