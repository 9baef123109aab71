"""What to expect, as pure formulas: bytes moved, bytes held, time. No torch, no ranks: numbers in, numbers out.

Sizes are in elements unless the name says bytes; ``element_bytes`` is 4 for float32. Each formula names its source or
is derived in its docstring; the labs hold every one against what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def even_share(total: int, ranks: int, what: str = "a size of") -> int:
    """How many of ``total`` each rank gets. Raises ValueError, with the arithmetic, where that is no whole number."""
    if total % ranks:
        raise ValueError(f"{ranks} ranks cannot share {what} {total}: {total} % {ranks} = {total % ranks}")
    return total // ranks


def shard_sizes(size: int, ranks: int, *, multiple: int = 1) -> list[int]:
    """The local sizes of a dimension cut over ranks as DTensor's Shard cuts it: ceil(size / ranks) each, then the rest.

    Args:
        size: the whole dimension, such as an image's width in pixels.
        ranks: how many share it.
        multiple: of which every local size is one: the network's total stride, so that no window crosses a cut.

    Raises:
        ValueError: a rank would get nothing, or a size that is not such a multiple; the message shows the arithmetic.
    """
    if size < 1 or ranks < 1:
        raise ValueError(f"cannot cut a size of {size} over {ranks} ranks: both must be at least 1")
    chunk = -(-size // ranks)
    sizes = [min(chunk, max(0, size - index * chunk)) for index in range(ranks)]
    if not sizes[-1]:
        raise ValueError(
            f"{ranks} ranks cannot share {size}: ceil({size} / {ranks}) = {chunk} leaves the last ones nothing"
        )
    for local in (sizes[0], sizes[-1]):
        if local % multiple:
            raise ValueError(
                f"{ranks} ranks cannot share {size}: a rank gets {local}, {local} % {multiple} = {local % multiple}; "
                f"with a total stride of {multiple} take a multiple of {ranks} x {multiple} = {ranks * multiple}"
            )
    return sizes


def named_axes(text: str, world_size: int) -> dict[str, int]:
    """A mesh's axes from text: ``"4"`` is {space: 4}, ``"2x2"`` is {data: 2, space: 2}, "" is one axis over all ranks.

    Raises:
        ValueError: text of another form, or lengths that do not multiply to the number of ranks.
    """
    parts = text.split("x") if text else [str(world_size)]
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"mesh {text!r} is neither one number of ranks, such as 4, nor data x space, such as 2x2")
    lengths = [int(part) for part in parts]
    if math.prod(lengths) != world_size:
        raise ValueError(
            f"mesh {text} is for {math.prod(lengths)} ranks, but {world_size} are launched: make them equal"
        )
    return dict(zip(("data", "space")[-len(lengths) :], lengths, strict=True))


@dataclass(frozen=True)
class Stage:
    """The feature maps of one ConvNeXt stage: [batch, channels, height, width], in ``depth`` blocks."""

    channels: int
    height: int
    width: int
    depth: int


def convnext_stages(height: int, width: int, depths: Sequence[int], dims: Sequence[int]) -> list[Stage]:
    """The sizes of every stage's feature maps: the stem divides height and width by 4, each later stage by 2 more.

    Args:
        height: of the images, or of one rank's strip of them.
        width: likewise.
        depths: blocks in each stage.
        dims: channels in each stage.
    """
    strides = [4 * 2**index for index in range(len(dims))]
    return [
        Stage(channels, height // stride, width // stride, depth)
        for channels, depth, stride in zip(dims, depths, strides, strict=True)
    ]


def total_stride(depths: Sequence[int]) -> int:
    """What a ConvNeXt of so many stages divides height and width by: 4 in the stem, 2 before each further stage."""
    return 4 * 2 ** (len(depths) - 1)


def check_convnext(height: int, width: int, depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raises ValueError, with the arithmetic, for images or stages that a ConvNeXt cannot have."""
    if len(depths) != len(dims) or not depths or min(*depths, *dims) < 1:
        raise ValueError(f"depths {tuple(depths)} and dims {tuple(dims)} must have one entry a stage, each at least 1")
    stride = total_stride(depths)
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % stride:
            raise ValueError(
                f"{name} {size} is not a multiple of the total stride {stride}: {size} % {stride} = {size % stride}"
            )


def check_strips(size: int, ranks: int, depths: Sequence[int], halo: int = 3) -> list[int]:
    """The strips of a ConvNeXt's images, checked for the deepest stage, where they are narrowest.

    Raises:
        ValueError: strips that are no multiple of the total stride, or narrower than the halo in the last stage.
    """
    stride = total_stride(depths)
    sizes = shard_sizes(size, ranks, multiple=stride)
    if ranks > 1 and sizes[-1] // stride < halo:
        raise ValueError(
            f"{ranks} ranks cannot share {size}: in the last stage a rank holds {sizes[-1]} / {stride} = "
            f"{sizes[-1] // stride}, less than the halo of {halo}; use fewer ranks, fewer stages or a larger image"
        )
    return sizes


def halo_bytes(*, rows: int, halo: int, channels: int, batch: int, element_bytes: int = 4) -> int:
    """Bytes that a rank sends to one neighbour before one convolution: ``halo`` columns of all rows and channels.

    Args:
        rows: length of the cut: the height where the width is cut, the width where the height is.
        halo: columns that the neighbour needs, (kernel - 1) / 2 for stride 1.
        channels: of the feature map.
        batch: samples that this rank holds.
        element_bytes: 4 for float32, 2 for bfloat16.
    """
    return rows * halo * channels * batch * element_bytes


def spatial_send_bytes(
    *, stages: Sequence[Stage], batch: int, neighbours: int, tensor_dim: int = 3, halo: int = 3, element_bytes: int = 4
) -> int:
    """Bytes that one rank sends to its neighbours in a whole training step of a ConvNeXt cut into strips.

    Every block exchanges one halo before its depthwise convolution and the gradient of one in the backward pass.

    Args:
        stages: from convnext_stages; the length of the cut is not divided, so whole or local sizes give the same.
        batch: samples that this rank holds.
        neighbours: 0, 1 (the first and the last rank) or 2.
        tensor_dim: 2 if the height is cut, 3 if the width.
        halo: of the depthwise convolution.
        element_bytes: 4 for float32.
    """
    return sum(
        2 * neighbours * stage.depth * halo_bytes(
            rows=stage.height if tensor_dim == 3 else stage.width,
            halo=halo, channels=stage.channels, batch=batch, element_bytes=element_bytes,
        )
        for stage in stages
    )  # fmt: skip


def convnext_parameters(depths: Sequence[int], dims: Sequence[int], num_classes: int, in_chans: int = 3) -> int:
    """Number of parameters of a ConvNeXt with layer scale, as labkit.models.convnext builds it.

    A block of C channels has a depthwise 7x7 (49 C + C), a norm (2 C), C to 4C and back (8 C^2 + 5 C) and gamma (C).
    A downsampling from A to B channels has a kernel (A B k^2 + B) and a norm of B in the stem, of A elsewhere.
    """
    total = dims[-1] * num_classes + num_classes
    for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
        dim_in, kernel = (dims[stage - 1], 2) if stage else (in_chans, 4)
        total += dim_in * dim * kernel**2 + dim + 2 * (dim_in if stage else dim)
        total += depth * (58 * dim + 8 * dim**2)
    return total


def convnext_parameter_tensors(depths: Sequence[int]) -> int:
    """Number of parameter tensors of a ConvNeXt: four in a downsampling, nine in a block, two in the head."""
    return 4 * len(depths) + 9 * sum(depths) + 2


def spatial_all_reduces(
    *,
    strategy: str,
    depths: Sequence[int],
    dims: Sequence[int],
    num_classes: int,
    batch: int,
    space_ranks: int,
    data_ranks: int = 1,
    element_bytes: int = 4,
) -> tuple[int, int]:
    """How many all-reduces one training step of a ConvNeXt cut into strips makes, and the bytes a rank hands to them.

    The mean over the image adds up one number for each sample and channel of the last stage along the space axis. Then
    the gradients, along each axis of the mesh: ``local`` hands over all in one flat bucket, so this holds for models
    below the bucket's 25 MiB; ``dtensor`` hands over each tensor alone, and the head's weight and bias, which all
    strips compute alike, along the data axis only.

    Args:
        strategy: "local" or "dtensor".
        depths: blocks in each stage.
        dims: channels in each stage.
        num_classes: outputs of the head.
        batch: samples that this rank holds.
        space_ranks: ranks that share an image.
        data_ranks: groups of ranks that share the samples out.
        element_bytes: 4 for float32.
    """
    if strategy not in ("local", "dtensor"):
        raise ValueError(f"strategy {strategy!r} is neither 'local' nor 'dtensor'")
    elements, head = convnext_parameters(depths, dims, num_classes), (dims[-1] + 1) * num_classes
    axes = (space_ranks > 1) + (data_ranks > 1)
    head_axes = axes if strategy == "local" else axes - (space_ranks > 1)
    count = axes if strategy == "local" else axes * (convnext_parameter_tensors(depths) - 2) + head_axes * 2
    gradients = axes * (elements - head) + head_axes * head
    means = batch * dims[-1] if space_ranks > 1 else 0
    return count + (space_ranks > 1), (gradients + means) * element_bytes


def all_reduce_bytes(elements: int, element_bytes: int = 4) -> int:
    """Bytes that a rank hands to an all-reduce: the whole tensor, whatever the number of ranks."""
    return elements * element_bytes


def ring_all_reduce_bytes(payload_bytes: int, ranks: int) -> float:
    """Bytes that a rank sends for an all-reduce done in a ring: 2 (ranks - 1) / ranks of the payload.

    A reduce-scatter and an all-gather, each of ranks - 1 steps that send 1 / ranks of it. Source: Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return 2 * (ranks - 1) / ranks * payload_bytes


def message_s(payload_bytes: float, *, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of one message: latency alpha plus size times beta, seconds. Source: Hockney, 1994."""
    return alpha_s + payload_bytes * beta_s_per_byte


def convnext_activation_bytes(
    *, stages: Sequence[Stage], batch: int, ranks: int = 1, tensor_dim: int = 3, halo: int = 3, element_bytes: int = 4
) -> int:
    """Bytes of activations that a ConvNeXt keeps for its backward pass, on one rank.

    In units of one feature map A = batch x C x height x width, a block keeps: the depthwise convolution's
    input (A, plus the halo), its output for the norm (A), the norm's for the first pointwise convolution (A), that
    one's for GELU (4 A), GELU's for the second (4 A), and its output for the layer scale (A): 12 A. A norm
    keeps a mean and a deviation a pixel as well. A downsampling keeps the norm's input and output. Memory peaks in the
    backward pass of the last block, when the first of these, the layer scale's input, is already gone: 1 A less there.

    Args:
        stages: from convnext_stages of this rank's strip.
        batch: samples that this rank holds.
        ranks: in the line of strips; with one there is no halo.
        tensor_dim: 2 if the height is cut, 3 if the width.
        halo: of the depthwise convolution.
        element_bytes: 4 for float32.
    """
    elements = 0
    for index, stage in enumerate(stages):
        pixels = batch * stage.height * stage.width
        border = batch * (stage.height if tensor_dim == 3 else stage.width) * 2 * halo if ranks > 1 else 0
        elements += stage.depth * (12 * pixels * stage.channels + border * stage.channels + 2 * pixels)
        elements += pixels * stage.channels + 2 * pixels if index == 0 else 0  # the stem's norm: its input
        if index + 1 < len(stages):
            elements += 2 * pixels * stage.channels + 2 * pixels  # the norm's input and output
        else:
            elements -= pixels * stage.channels
    return elements * element_bytes
