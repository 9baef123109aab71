"""Predict sizes, bytes moved and bytes held of a ConvNeXt that is cut into strips.

Sizes are in elements unless the name says bytes. Arguments of all functions:

    batch           samples that this rank holds
    depths, dims    blocks and channels in each stage
    stages          from convnext_stages, of the whole images or of this rank's strip of them
    tensor_dim      2 if the height is cut, 3 if the width
    halo            columns that a neighbour needs: (kernel - 1) / 2 for stride 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.theory.sizes import shard_sizes

HALO = 3
"""Columns that a neighbour needs for a depthwise 7x7 convolution."""


@dataclass(frozen=True)
class ConvNeXtStage:
    """The feature maps of one ConvNeXt stage: [batch, channels, height, width], in depth blocks."""

    channels: int
    height: int
    width: int
    depth: int


def convnext_stages(
    height: int, width: int, depths: Sequence[int], dims: Sequence[int]
) -> list[ConvNeXtStage]:
    """Return each stage's sizes: the stem divides height and width by 4, a later stage by 2."""
    strides = [4 * 2**index for index in range(len(dims))]
    return [
        ConvNeXtStage(channels, height // stride, width // stride, depth)
        for channels, depth, stride in zip(dims, depths, strides, strict=True)
    ]


def total_stride(depths: Sequence[int]) -> int:
    """Return the factor by which a ConvNeXt of these stages divides height and width."""
    return 4 * 2 ** (len(depths) - 1)


def check_convnext(height: int, width: int, depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raise ValueError, with the arithmetic, for images or stages that a ConvNeXt cannot have."""
    if len(depths) != len(dims) or not depths or min(*depths, *dims) < 1:
        given = f"depths {tuple(depths)} and dims {tuple(dims)}"
        raise ValueError(f"{given} must have one entry a stage, each at least 1")
    stride = total_stride(depths)
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % stride:
            rule = f"{name} {size} is not a multiple of the total stride {stride}"
            raise ValueError(f"{rule}: {size} % {stride} = {size % stride}")


def check_strips(size: int, ranks: int, depths: Sequence[int]) -> list[int]:
    """Return the widths of the strips, after checking them for the deepest and narrowest stage."""
    stride = total_stride(depths)
    widths = shard_sizes(size, ranks, multiple=stride)
    if ranks > 1 and widths[-1] // stride < HALO:
        held = f"in the last stage a rank holds {widths[-1]} / {stride} = {widths[-1] // stride}"
        fix = "use fewer ranks, fewer stages or a larger image"
        rule = f"{ranks} ranks cannot share {size}: {held}, less than the halo of {HALO}"
        raise ValueError(f"{rule}; {fix}")
    return widths


def check_equal_strips(size: int, ranks: int, tensor_dim: int) -> None:
    """Raise ValueError, with the arithmetic, unless strips of a DTensor are equally wide."""
    if rest := size % ranks:
        raise ValueError(
            f"{ranks} ranks cannot share {size} along dim {tensor_dim} as a DTensor: {size} %"
            f" {ranks} = {rest}; use strategy local or a size that {ranks} divides"
        )


def halo_bytes(*, rows: int, halo: int, channels: int, batch: int, element_bytes: int = 4) -> int:
    """Return the bytes sent to one neighbour before one convolution; the cut is ``rows`` long."""
    return rows * halo * channels * batch * element_bytes


def spatial_send_bytes(
    *, stages: Sequence[ConvNeXtStage], batch: int, neighbours: int, tensor_dim: int = 3
) -> int:
    """Return the float32 bytes that a rank sends to its neighbours in a training step.

    Every block exchanges a halo before its depthwise convolution, and the halo's gradient in the
    backward pass. Stages of whole images and of strips give the same: the cut is not divided.
    """
    total = 0
    for stage in stages:
        rows = stage.height if tensor_dim == 3 else stage.width
        one_way = halo_bytes(rows=rows, halo=HALO, channels=stage.channels, batch=batch)
        total += 2 * neighbours * stage.depth * one_way
    return total


def convnext_parameters(
    depths: Sequence[int], dims: Sequence[int], num_classes: int, in_chans: int = 3
) -> int:
    """Return the number of parameters of labkit.models.convnext's ConvNeXt with layer scale."""
    total = dims[-1] * num_classes + num_classes
    for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
        dim_in, kernel = (dims[stage - 1], 2) if stage else (in_chans, 4)
        # A downsampling: kernel, bias, and a norm of its input, or of its output in the stem.
        total += dim_in * dim * kernel**2 + dim + 2 * (dim_in if stage else dim)
        # A block: depthwise 7x7 (49 C + C), norm (2 C), C to 4 C and back (8 C^2 + 5 C), gamma (C).
        total += depth * (58 * dim + 8 * dim**2)
    return total


def convnext_parameter_tensors(depths: Sequence[int]) -> int:
    """Return the number of parameter tensors of a ConvNeXt."""
    # Four in a downsampling, nine in a block, two in the head.
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
) -> tuple[int, int]:
    """Return the number of all-reduces in a training step, and the float32 bytes handed to them.

    The mean over the image sums one element per sample and channel of the last stage along the
    space axis. Gradients follow along each axis of the mesh: strategy ``local`` sends all of them
    in one flat bucket, below its 25 MiB, and ``dtensor`` each tensor alone.
    """
    if strategy not in ("local", "dtensor"):
        raise ValueError(f"strategy {strategy!r} is neither 'local' nor 'dtensor'")
    elements, head = convnext_parameters(depths, dims, num_classes), (dims[-1] + 1) * num_classes
    along_space = int(space_ranks > 1)
    axes = along_space + (data_ranks > 1)
    head_axes, count = axes, axes
    if strategy == "dtensor":
        # All strips compute the same gradient for the head.
        head_axes = axes - along_space
        count = axes * (convnext_parameter_tensors(depths) - 2) + head_axes * 2
    gradients = axes * (elements - head) + head_axes * head
    means = along_space * batch * dims[-1]
    return count + along_space, (gradients + means) * 4


def convnext_activation_bytes(
    *,
    stages: Sequence[ConvNeXtStage],
    batch: int,
    ranks: int = 1,
    tensor_dim: int = 3,
    element_bytes: int = 4,
) -> int:
    """Return the bytes of activations that a rank keeps for a ConvNeXt's backward pass.

    In units of one feature map A = batch x C x height x width, a block keeps the depthwise
    convolution's input (A, plus the halo) and output (A), the first pointwise convolution's input
    (A), GELU's input and output (4 A each), and the layer scale's input (A): 12 A. A norm also
    keeps a mean and a deviation per pixel. ``stages`` are those of one of ``ranks`` strips.
    """
    elements = 0
    for index, stage in enumerate(stages):
        pixels = batch * stage.height * stage.width
        rows = stage.height if tensor_dim == 3 else stage.width
        border = batch * rows * 2 * HALO if ranks > 1 else 0
        elements += stage.depth * ((12 * pixels + border) * stage.channels + 2 * pixels)
        # The stem's norm keeps its input.
        if index == 0:
            elements += pixels * stage.channels + 2 * pixels
        # A downsampling keeps its norm's input and output.
        if index + 1 < len(stages):
            elements += 2 * pixels * stage.channels + 2 * pixels
        else:
            # Memory peaks in the last block's backward pass, when its layer scale's input is freed.
            elements -= pixels * stage.channels
    return elements * element_bytes


def checkpointed_bytes(stages: Sequence[ConvNeXtStage], batch: int, element_bytes: int = 4) -> int:
    """Return the bytes of activations at the peak if every block is checkpointed, on one device.

    While a block is computed again it keeps 12 times its input, beside the inputs of the blocks
    before it: those after it are done. What is outside blocks, about 2 percent, is left out.
    """
    peak, before = 0, 0
    for each in stages:
        size = batch * each.channels * each.height * each.width
        peak = max(peak, before + (each.depth - 1 + 12) * size)
        before += each.depth * size
    return peak * element_bytes
