"""What lab 1 predicts of a ConvNeXt cut into strips: sizes, bytes moved, bytes held. Numbers in,
numbers out.

Sizes are in elements unless the name says bytes. Each formula names its source or is derived in its
docstring; the labs hold every one against what was measured. What arguments mean everywhere:

    batch           samples that this rank holds
    depths, dims    blocks and channels in each stage
    stages          from convnext_stages, of the whole images or of this rank's strip of them
    tensor_dim      2 if the height is cut, 3 if the width
    halo            columns that a neighbour needs: (kernel - 1) / 2 for stride 1, 3 for ConvNeXt's
    7x7 element_bytes   4 for float32, 2 for bfloat16
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.theory.sizes import shard_sizes


@dataclass(frozen=True)
class ConvNeXtStage:
    """The feature maps of one ConvNeXt stage: [batch, channels, height, width], in ``depth``
    blocks.
    """

    channels: int
    height: int
    width: int
    depth: int


def convnext_stages(
    height: int, width: int, depths: Sequence[int], dims: Sequence[int]
) -> list[ConvNeXtStage]:
    """The sizes of every stage's feature maps: the stem divides height and width by 4, each later
    stage by 2 more.
    """
    strides = [4 * 2**index for index in range(len(dims))]
    return [
        ConvNeXtStage(channels, height // stride, width // stride, depth)
        for channels, depth, stride in zip(dims, depths, strides, strict=True)
    ]


def total_stride(depths: Sequence[int]) -> int:
    """What a ConvNeXt of so many stages divides height and width by: 4 in the stem, 2 before each
    further stage.
    """
    return 4 * 2 ** (len(depths) - 1)


def check_convnext(height: int, width: int, depths: Sequence[int], dims: Sequence[int]) -> None:
    """Raises ValueError, with the arithmetic, for images or stages that a ConvNeXt cannot have."""
    if len(depths) != len(dims) or not depths or min(*depths, *dims) < 1:
        raise ValueError(
            f"depths {tuple(depths)} and dims {tuple(dims)} must have one entry a stage, each at"
            " least 1"
        )
    stride = total_stride(depths)
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % stride:
            raise ValueError(
                f"{name} {size} is not a multiple of the total stride {stride}: {size} % {stride} ="
                f" {size % stride}"
            )


def check_strips(size: int, ranks: int, depths: Sequence[int], halo: int = 3) -> list[int]:
    """The strips of a ConvNeXt's images, checked for the deepest stage, where they are narrowest.

    Raises:
        ValueError: strips that are no multiple of the total stride, or narrower than the halo in
            the last stage.
    """
    stride = total_stride(depths)
    widths = shard_sizes(size, ranks, multiple=stride)
    if ranks > 1 and widths[-1] // stride < halo:
        raise ValueError(
            f"{ranks} ranks cannot share {size}: in the last stage a rank holds {widths[-1]} /"
            f" {stride} = {widths[-1] // stride}, less than the halo of {halo}; use fewer ranks,"
            " fewer stages or a larger image"
        )
    return widths


def halo_bytes(*, rows: int, halo: int, channels: int, batch: int, element_bytes: int = 4) -> int:
    """Bytes that a rank sends to one neighbour before one convolution: ``halo`` columns of all rows
    and channels.

    ``rows`` is the length of the cut: the height where the width is cut, the width where the height
    is.
    """
    return rows * halo * channels * batch * element_bytes


def spatial_send_bytes(
    *,
    stages: Sequence[ConvNeXtStage],
    batch: int,
    neighbours: int,
    tensor_dim: int = 3,
    halo: int = 3,
) -> int:
    """Bytes of float32 that one rank sends to its neighbours in a whole training step of a ConvNeXt
    cut into strips.

    Every block exchanges one halo before its depthwise convolution and the gradient of one in the
    backward pass. There are 0, 1 (for the first and the last rank) or 2 ``neighbours``. The length
    of the cut is not divided, so stages of whole images and of strips give the same.
    """
    total = 0
    for stage in stages:
        rows = stage.height if tensor_dim == 3 else stage.width
        total += (
            2
            * neighbours
            * stage.depth
            * halo_bytes(rows=rows, halo=halo, channels=stage.channels, batch=batch)
        )
    return total


def convnext_parameters(
    depths: Sequence[int], dims: Sequence[int], num_classes: int, in_chans: int = 3
) -> int:
    """Number of parameters of a ConvNeXt with layer scale, as labkit.models.convnext builds it.

    A block of C channels has a depthwise 7x7 (49 C + C), a norm (2 C), C to 4C and back (8 C^2 + 5
    C) and gamma (C). A downsampling from A to B channels has a kernel (A B k^2 + B) and a norm of B
    in the stem, of A elsewhere.
    """
    total = dims[-1] * num_classes + num_classes
    for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
        dim_in, kernel = (dims[stage - 1], 2) if stage else (in_chans, 4)
        total += dim_in * dim * kernel**2 + dim + 2 * (dim_in if stage else dim)
        total += depth * (58 * dim + 8 * dim**2)
    return total


def convnext_parameter_tensors(depths: Sequence[int]) -> int:
    """Number of parameter tensors of a ConvNeXt: four in a downsampling, nine in a block, two in
    the head.
    """
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
    """How many all-reduces a training step of a ConvNeXt cut into strips makes, and the bytes a
    rank hands to them.

    The mean over the image adds up one number for each sample and channel of the last stage along
    the space axis. Then the gradients, along each axis of the mesh: ``local`` hands over all in one
    flat bucket, so this holds for models below the bucket's 25 MiB; ``dtensor`` hands over each
    tensor alone, and the head's weight and bias, which all strips compute alike, along the data
    axis only. Numbers are float32.

    Raises:
        ValueError: a strategy that is neither of the two.
    """
    if strategy not in ("local", "dtensor"):
        raise ValueError(f"strategy {strategy!r} is neither 'local' nor 'dtensor'")
    elements, head = convnext_parameters(depths, dims, num_classes), (dims[-1] + 1) * num_classes
    axes = (space_ranks > 1) + (data_ranks > 1)
    head_axes = axes if strategy == "local" else axes - (space_ranks > 1)
    count = (
        axes
        if strategy == "local"
        else axes * (convnext_parameter_tensors(depths) - 2) + head_axes * 2
    )
    gradients = axes * (elements - head) + head_axes * head
    means = batch * dims[-1] if space_ranks > 1 else 0
    return count + (space_ranks > 1), (gradients + means) * 4


def convnext_activation_bytes(
    *,
    stages: Sequence[ConvNeXtStage],
    batch: int,
    ranks: int = 1,
    tensor_dim: int = 3,
    halo: int = 3,
    element_bytes: int = 4,
) -> int:
    """Bytes of activations that a ConvNeXt keeps for its backward pass, on one rank.

    In units of one feature map A = batch x C x height x width, a block keeps: the depthwise
    convolution's input (A, plus the halo), its output for the norm (A), the norm's for the first
    pointwise convolution (A), that one's for GELU (4 A), GELU's for the second (4 A), and its
    output for the layer scale (A): 12 A. A norm keeps a mean and a deviation a pixel as well. A
    downsampling keeps the norm's input and output. Memory peaks in the backward pass of the last
    block, when the first of these, the layer scale's input, is already gone: 1 A less there.

    ``stages`` are those of this rank's strip; with one of ``ranks`` in the line there is no halo.
    """
    elements = 0
    for index, stage in enumerate(stages):
        pixels = batch * stage.height * stage.width
        border = (
            batch * (stage.height if tensor_dim == 3 else stage.width) * 2 * halo
            if ranks > 1
            else 0
        )
        elements += stage.depth * (
            12 * pixels * stage.channels + border * stage.channels + 2 * pixels
        )
        elements += (
            pixels * stage.channels + 2 * pixels if index == 0 else 0
        )  # the stem's norm: its input
        if index + 1 < len(stages):
            elements += 2 * pixels * stage.channels + 2 * pixels  # the norm's input and output
        else:
            elements -= pixels * stage.channels
    return elements * element_bytes


def strip_step_s(
    plain_s: float,
    ranks: int,
    messages: int,
    message_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
) -> float:
    """Seconds of a step cut into strips, where nothing hides: the arithmetic's share, then every
    message.

    Args:
        plain_s: of the same step on one device.
        ranks: how many share it.
        messages: that a rank waits for in a step, one after another.
        message_bytes: of each.
        alpha_s: latency of a message.
        beta_s_per_byte: what each byte adds.
    """
    return plain_s / ranks + messages * (alpha_s + message_bytes * beta_s_per_byte)
