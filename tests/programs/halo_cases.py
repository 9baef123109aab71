"""Four ranks convolve strips, and one device the whole image, for many settings in one launch.

Each case records its largest relative error, over all ranks, and how many tensors were compared. Numbers are float64,
so an error above rounding stands out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from labkit import parity, rank
from labkit.parallel.buckets import GradientBuckets
from labkit.parallel.halo import HaloConv2d, Strip, halo_size, spatial_mean
from labkit.theory import sizes

SAMPLES, CHANNELS, ACROSS = 4, 4, 6


@dataclass
class Case:
    """A convolution and how its image is cut."""

    settings: dict[str, Any]
    size: int = 16
    """Of the cut dimension; uneven strips are cut as DTensor cuts them."""
    dim: int = 3
    mesh: tuple[int, ...] = (4,)
    channels_last: bool = False
    dtensor: bool = False
    compared: int = field(default=4, init=False)
    """Output, and the gradients of input, weight and bias."""


SEVEN = {"kernel_size": 7, "padding": 3}
CASES = {
    "width": Case(SEVEN),
    "height": Case(SEVEN, dim=2),
    "depthwise": Case(SEVEN | {"groups": CHANNELS}),
    "strip_as_narrow_as_its_halo": Case(SEVEN, size=12),
    "dilation": Case({"kernel_size": 3, "padding": 2, "dilation": 2}),
    "dilation_of_height": Case({"kernel_size": 3, "padding": 4, "dilation": 4}, dim=2),
    "other_padding_across": Case({"kernel_size": (3, 5), "padding": (0, 2)}),
    "stride_is_kernel": Case({"kernel_size": 2, "stride": 2}),
    "stride_is_kernel_of_height": Case({"kernel_size": 4, "stride": 4}, dim=2),
    "one_by_one": Case({"kernel_size": 1}),
    "uneven": Case({"kernel_size": 5, "padding": 2}, size=17),
    "uneven_height": Case({"kernel_size": 3, "padding": 1}, size=7, dim=2),
    "two_ranks_a_line": Case(SEVEN, mesh=(2, 2)),
    "two_ranks_a_line_of_height": Case(SEVEN, dim=2, mesh=(2, 2)),
    "uneven_on_two_axes": Case({"kernel_size": 3, "padding": 1}, size=9, mesh=(2, 2)),
    "one_rank_a_line": Case(SEVEN, mesh=(4, 1)),
    "channels_last": Case(SEVEN, channels_last=True),
    "channels_last_height": Case(SEVEN, dim=2, channels_last=True),
    "dtensor": Case(SEVEN, dtensor=True),
    "dtensor_height_on_two_axes": Case(SEVEN, dim=2, mesh=(2, 2), dtensor=True),
    "dtensor_stride_is_kernel": Case({"kernel_size": 2, "stride": 2}, dtensor=True),
}


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    with rank.session() as here:
        for name, case in CASES.items():
            record(here, name, convolve(here, case))
        for uneven in (False, True):
            record(here, f"mean_{uneven=}", mean(here, 14 if uneven else 16))
        for mesh in ((4,), (2, 2)):
            record(here, f"buckets_{len(mesh)}", reduce_in_buckets(here, mesh))


def record(here: rank.Session, name: str, found: parity.Parity) -> None:
    here.record_scalar(f"{name} error", found.largest_error()[0])
    here.record_scalar(f"{name} compared", found.compared)


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def image_of(size: int, dim: int) -> Tensor:
    return seeded((SAMPLES, CHANNELS, size, ACROSS) if dim == 2 else (SAMPLES, CHANNELS, ACROSS, size), 1)


class Cut:
    """How tensors of a case are cut: strips along the last mesh axis, samples along the one before."""

    def __init__(self, here: rank.Session, mesh: tuple[int, ...], dim: int):
        names = ("data", "space")[-len(mesh) :]
        self.mesh = here.mesh(**dict(zip(names, mesh, strict=True)))
        self.strip = Strip.from_mesh(self.mesh, len(mesh) - 1, dim)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of an image or feature map."""
        dim, widths = self.strip.dim, sizes.shard_sizes(whole.shape[self.strip.dim], self.strip.ranks)
        samples = len(whole) * self.strip.ranks // self.mesh.size()
        first = self.mesh.get_local_rank(0) * samples if self.mesh.ndim == 2 else 0
        start = sum(widths[: self.strip.rank])
        return whole[first : first + samples].narrow(dim, start, widths[self.strip.rank])

    def summed(self, part: Tensor) -> Tensor:
        """The sum over all ranks."""
        return DTensor.from_local(part, self.mesh, [Partial()] * self.mesh.ndim).full_tensor()


def convolve(here: rank.Session, case: Case) -> parity.Parity:
    """Output and gradients of one convolution, cut and whole."""
    cut = Cut(here, case.mesh, case.dim)
    torch.manual_seed(2)
    reference = nn.Conv2d(CHANNELS, CHANNELS, **case.settings, dtype=torch.float64)
    conv = copy.deepcopy(reference)
    whole = image_of(case.size, case.dim).requires_grad_()
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    strip = cut.own(whole.detach()).clone(memory_format=memory_format).requires_grad_()
    given = strip
    if case.dtensor:
        strips = [Shard(case.dim) if axis == cut.mesh.ndim - 1 else Shard(0) for axis in range(cut.mesh.ndim)]
        given = DTensor.from_local(strip, cut.mesh, strips)
        for name, parameter in list(conv.named_parameters()):
            shared = distribute_tensor(parameter.detach(), cut.mesh, [Replicate()] * cut.mesh.ndim)
            conv.register_parameter(name, nn.Parameter(shared))
    out = HaloConv2d(conv, halo_size(conv, case.dim), cut.strip)(given)
    expected = reference(whole)
    gradient = seeded(tuple(expected.shape), 3)
    expected.backward(gradient)
    local = out.to_local() if case.dtensor else out
    local.backward(cut.own(gradient))
    found = parity.Parity()
    found.compare_tensor("output", local, cut.own(expected))
    found.compare_tensor("input gradient", strip.grad, cut.own(whole.grad))
    for name, parameter in conv.named_parameters():
        total = parameter.grad.full_tensor() if case.dtensor else cut.summed(parameter.grad)
        found.compare_tensor(name, total, reference.get_parameter(name).grad)
    if here.world_size > 1 and case.channels_last:
        assert local.is_contiguous(memory_format=torch.channels_last)
    return found


def mean(here: rank.Session, size: int) -> parity.Parity:
    """spatial_mean: the image's mean, and ranks times its gradient (GradientBuckets divides by the ranks)."""
    cut = Cut(here, (4,), 3)
    whole = image_of(size, 3).requires_grad_()
    strip = cut.own(whole.detach()).clone().requires_grad_()
    cut.strip.share = strip.shape[3] / size
    got, expected = spatial_mean(strip, cut.strip), whole.mean(dim=(2, 3))
    gradient = seeded(tuple(expected.shape), 4)
    got.backward(gradient)
    expected.backward(gradient)
    found = parity.Parity()
    found.compare_tensor("mean", got, expected)
    found.compare_tensor("gradient", strip.grad, here.world_size * cut.own(whole.grad))
    return found


def reduce_in_buckets(here: rank.Session, mesh: tuple[int, ...]) -> parity.Parity:
    """Gradients of several small buckets are means over all ranks, in each of two backward passes that add up."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    buckets = GradientBuckets(model.parameters(), Cut(here, mesh, 3).mesh, bucket_bytes=100)
    assert [sum(p.numel() for p in bucket) for bucket in buckets.buckets] == [18, 30], buckets.buckets
    inputs = seeded((2, here.world_size, 4, 6), 6)
    found = parity.Parity()
    for step in range(2):
        model(inputs[step, here.rank]).square().sum().backward()
        for other in range(here.world_size):
            (reference(inputs[step, other]).square().sum() / here.world_size).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found.compare_tensor(f"{name} {step}", parameter.grad, reference.get_parameter(name).grad)
    return found


if __name__ == "__main__":
    rank.run_main(main, Config)
