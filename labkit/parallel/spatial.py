"""Shard a convolutional network's activations along the height or the width of its images.

Legend: N images, C channels, H height, W width; ``dim`` is the cut dimension, 2 or 3.

Every rank of the mesh axis ``mesh_dim`` holds one strip of every image and feature map, and all
parameters. A second mesh axis, if there is one, shares the samples out. There are three strategies,
each faster than the one before:

| strategy | tensors                         | halo exchange                 | gradients           |
| -------- | ------------------------------- | ----------------------------- | ------------------- |
| native   | DTensor                         | PyTorch's DTensor convolution | one collective each |
| dtensor  | DTensor                         | labkit.parallel.halo          | one collective each |
| local    | DTensor input, then plain local | labkit.parallel.halo          | in buckets          |

``native`` is refused, because it computes wrong results in all torch versions so far;
``native_unguarded`` runs nevertheless. The model takes a DTensor from ``shard_batch`` and returns
the plain logits of this rank's samples. After ``loss.backward()`` of their mean loss, each gradient
is that of the mean over all samples; that of the images is computed only if they require one.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from labkit import requirements
from labkit.models.convnext import ConvNeXt, StochasticDepth
from labkit.parallel import halo
from labkit.parallel.buckets import GradientBuckets
from labkit.parallel.halo import HaloConv2d, Strip, call_on_strip
from labkit.theory import sizes
from labkit.theory.spatial import check_equal_strips

Strategy = Literal["native", "native_unguarded", "dtensor", "local"]


def apply_spatial(
    model: ConvNeXt,
    mesh: DeviceMesh,  # (space), or (data, space)
    *,
    strategy: Strategy,  # see the module's table
    tensor_dim: int = 3,  # 2 cuts the height, 3 the width
    mesh_dim: int | str | None = None,  # index or name of the strips' axis; by default the last
    pad: Callable[[Tensor, int, Strip], Tensor] | None = None,  # replaces labkit's exchange
    reduces: bool = True,  # else, with local, each rank keeps its own part of each gradient
) -> ConvNeXt:
    """Shard a model's activations in place, and give all ranks the parameters of the first.

    Zero the gradients before each backward pass: with DTensors and a data axis, old gradients would
    be divided by the number of data ranks again.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy {strategy!r} is none of {', '.join(get_args(Strategy))}")
    if tensor_dim not in (2, 3):
        raise ValueError(f"tensor_dim {tensor_dim} is neither 2 (height) nor 3 (width)")
    requirements.refuse_native_strategy(strategy)
    axis = axis_index(mesh, mesh_dim)
    strip = Strip.from_mesh(mesh, axis, tensor_dim)
    strip.pad = pad
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    # Columns to exchange; refuses a convolution that cannot be cut.
    halos = {conv: halo.halo_size(conv, tensor_dim) for conv in convs}
    _agree_on_dropped_samples(model, mesh, axis)
    if strategy == "local":
        _apply_local(model, mesh, strip, halos, reduces)
    else:
        _apply_dtensor(model, mesh, axis, strip, halos if strategy == "dtensor" else {})
    return model


def axis_index(mesh: DeviceMesh, mesh_dim: int | str | None) -> int:
    """Return the index of the strips' mesh axis, by default the last."""
    if mesh.ndim > 2:
        raise ValueError(f"mesh of {mesh.ndim} axes: take one (space) or two (data x space)")
    axes: dict[int | str, int] = {axis: axis for axis in range(mesh.ndim)}
    axes |= {name: axis for axis, name in enumerate(mesh.mesh_dim_names or ())}
    chosen = mesh.ndim - 1 if mesh_dim is None else mesh_dim
    if chosen not in axes:
        raise ValueError(f"mesh axis {chosen!r} is none of {', '.join(map(str, axes))}")
    return axes[chosen]


def shard_batch(
    images: Tensor,  # [N, C, H, W]
    labels: Tensor,  # [N]
    mesh: DeviceMesh,
    *,
    tensor_dim: int = 3,
    mesh_dim: int | str | None = None,
    stride: int = 1,  # the network's total stride, 32 for four stages, which divides every strip
) -> tuple[DTensor, Tensor]:
    """Return this rank's strips and labels of a batch that every rank holds; sends nothing."""
    axis = axis_index(mesh, mesh_dim)
    widths = sizes.shard_sizes(images.shape[tensor_dim], mesh.size(axis), multiple=stride)
    index = mesh.get_local_rank(axis)
    samples = own_samples(mesh, len(images), mesh_dim)
    strip = images[samples].narrow(tensor_dim, sum(widths[:index]), widths[index])
    strip = strip.clone(memory_format=halo.image_memory_format(images))
    placements = [Shard(tensor_dim) if each == axis else Shard(0) for each in range(mesh.ndim)]
    whole = DTensor.from_local(strip, mesh, placements, shape=images.shape, stride=images.stride())
    return whole, labels[samples]


def own_samples(mesh: DeviceMesh, batch: int, mesh_dim: int | str | None = None) -> slice:
    """Return this rank's samples of the batch: all, or its share along the data axis."""
    if mesh.ndim == 1:
        return slice(0, batch)
    data = 1 - axis_index(mesh, mesh_dim)
    count = sizes.even_share(batch, mesh.size(data), what="a batch of")
    return slice(mesh.get_local_rank(data) * count, (mesh.get_local_rank(data) + 1) * count)


def _replace_modules(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])


def _apply_local(
    model: ConvNeXt, mesh: DeviceMesh, strip: Strip, halos: dict[nn.Conv2d, int], reduces: bool
) -> None:
    # A convolution without a halo needs no exchange, so it stays as it is.
    with_halo = {conv: HaloConv2d(conv, size, strip) for conv, size in halos.items() if size}
    _replace_modules(model, with_halo)
    # Rank 0's values on every rank, as distribute_tensor sees to for DTensors.
    for tensor in [*model.parameters(), *model.buffers()]:
        for axis in range(mesh.ndim):
            dist.broadcast(tensor.detach(), group=mesh.get_group(axis), group_src=0)

    def to_local(module: nn.Module, args: tuple[DTensor]) -> tuple[Tensor]:
        images = args[0].to_local()
        # Strips may be unequal, so each counts by its part of the image.
        strip.share = images.shape[strip.dim] / args[0].shape[strip.dim]
        return (_divide_gradient(images, mesh.size() if reduces else 1),)

    model.register_forward_pre_hook(to_local)
    mean = partial(halo.spatial_mean, strip=strip, average=reduces)
    model.mean.forward = mean  # type: ignore[method-assign]
    if reduces:
        GradientBuckets(model.parameters(), mesh)


def _apply_dtensor(
    model: ConvNeXt, mesh: DeviceMesh, axis: int, strip: Strip, halos: dict[nn.Conv2d, int]
) -> None:
    data_ranks = mesh.size() // mesh.size(axis)
    _replicate_parameters(model, mesh, data_ranks)
    _replace_modules(model, {conv: HaloConv2d(conv, size, strip) for conv, size in halos.items()})
    for module in model.modules():
        # It keeps or drops whole samples, for which a strip needs no other strip.
        if isinstance(module, StochasticDepth):
            module.forward = partial(call_on_strip, module.forward)  # type: ignore[method-assign]
    # Since 2.12 torch labels the output of a convolution as replicated.
    if not halos and requirements.torch_version() >= (2, 12):
        _relabel_as_strips(model)

    def check_strips(module: nn.Module, args: tuple[DTensor]) -> tuple[DTensor] | None:
        # A DTensor made from a local strip assumes that the other strips have the same size.
        check_equal_strips(args[0].shape[strip.dim], strip.ranks, strip.dim)
        if not args[0].requires_grad:
            return None
        return (call_on_strip(partial(_divide_gradient, ranks=data_ranks), args[0]),)

    model.register_forward_pre_hook(check_strips)
    # A strip's mean over H and W is a term of a sum, which redistribute adds up.
    samples = [Replicate() if index == axis else Shard(0) for index in range(mesh.ndim)]
    model.mean.register_forward_hook(
        lambda module, args, features: features.redistribute(placements=samples)
    )
    model.register_forward_hook(lambda module, args, logits: logits.to_local())


def _divide_gradient(strip: Tensor, ranks: int) -> Tensor:
    """Return the strip, whose gradient becomes a mean over ranks, as those of parameters do."""
    if strip.requires_grad:
        strip.register_hook(lambda gradient: gradient / ranks)
    return strip


def _replicate_parameters(model: nn.Module, mesh: DeviceMesh, data_ranks: int) -> None:
    replicated = [Replicate()] * mesh.ndim

    def sum_gradient(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        # Strips are terms of a sum, but samples are averaged.
        mean = parameter.grad.redistribute(placements=replicated) / data_ranks
        # Adam's fused kernel needs the parameter's strides, which redistribute loses in torch 2.11.
        parameter.grad = torch.empty_like(parameter).copy_(mean)

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, replicated)
            shared = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            if shared.requires_grad:
                shared.register_post_accumulate_grad_hook(sum_gradient)
            module.register_parameter(name, shared)


def _relabel_as_strips(model: nn.Module) -> None:
    """Mark every convolution's output as strips, where torch calls it replicated, to demonstrate.

    The model then trains, but every value that depends on a halo or on a sum over ranks is wrong.
    Without this, training fails later, with an error that hides the cause.
    """

    def relabel_input(conv: nn.Module, args: tuple[DTensor]) -> DTensor:
        x, mesh = args[0].to_local(), args[0].device_mesh
        # Until 2.13 torch calls the gradient of a strip replicated, since 2.14 a strip.
        strips, replicated = args[0].placements, [Replicate()] * mesh.ndim
        labels = replicated if requirements.torch_version() < (2, 14) else strips
        return DTensor.from_local(x, mesh, strips, grad_placements=labels)

    def relabel_output(conv: nn.Module, args: tuple[DTensor], out: DTensor) -> DTensor:
        strips = args[0].placements
        return DTensor.from_local(out.to_local(grad_placements=strips), out.device_mesh, strips)

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(relabel_input)
            module.register_forward_hook(relabel_output)


def _agree_on_dropped_samples(model: nn.Module, mesh: DeviceMesh, axis: int) -> None:
    """Drop all strips of a sample together, by one random stream for the whole mesh."""
    device = next(model.parameters()).device
    seed = torch.tensor([torch.initial_seed() % 2**62], device=device)
    for index in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(index), group_src=0)
    # A fake tensor has no value.
    drawn = int(seed) if type(seed) is Tensor else torch.initial_seed()
    generator = torch.Generator().manual_seed(drawn)
    for module in model.modules():
        if isinstance(module, StochasticDepth):
            module.generator = generator
            if mesh.ndim == 2:
                module.shard, module.shards = mesh.get_local_rank(1 - axis), mesh.size(1 - axis)
