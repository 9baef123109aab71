"""Estimate what lab 1's strips take on the course's reference cluster, by the lab's formula."""

from collections.abc import Sequence

from labkit.theory import spatial
from labkit.theory.two_dim import BFLOAT16_BYTES, H100_FLOPS_PER_S


def strips_on_cluster_ms(
    size: int,
    bytes_per_s: float,
    *,
    depths: Sequence[int],
    dims: Sequence[int],
    ranks: int = 8,
    latency_s: float = 10e-6,
) -> tuple[float, float]:
    """Return the milliseconds of a ConvNeXt's step for one image: on one device, and in strips.

    A rank in the middle sends one message after another, in bfloat16.

    Args:
        size: height and width of the image, in pixels.
        bytes_per_s: bandwidth of a rank's link.
        depths: blocks of each stage.
        dims: channels of each stage.
        ranks: number of strips.
        latency_s: of one message.
    """
    stages = spatial.convnext_stages(size, size, depths, dims)
    # Of a block: two 1 x 1 convolutions and the depthwise one; norms and downsampling are left out.
    multiplications = sum(
        each.depth * (8 * each.channels**2 + 49 * each.channels) * each.height * each.width
        for each in stages
    )
    # Two operations each, in the forward pass, and twice as many backward.
    one_device_s = 6 * multiplications / H100_FLOPS_PER_S
    sends = 4 * sum(depths)
    sent = 2 * spatial.spatial_send_bytes(stages=stages, batch=1, neighbours=1)
    halos_s = sends * latency_s + sent * BFLOAT16_BYTES / 4 / bytes_per_s
    gradients = BFLOAT16_BYTES * spatial.convnext_parameters(depths, dims, num_classes=1000)
    means = BFLOAT16_BYTES * dims[-1]
    steps = 2 * (ranks - 1)
    rings_s = steps * (2 * latency_s + (gradients + means) / ranks / bytes_per_s)
    return 1e3 * one_device_s, 1e3 * (one_device_s / ranks + halos_s + rings_s)
