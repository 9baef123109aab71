"""Estimate what lab 1's strips take on the course's reference cluster, by the lab's formula."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas

from labkit.theory import spatial
from labkit.theory.two_dim import BFLOAT16_BYTES, H100_FLOPS_PER_S

LATENCY_S = 10e-6
"""Of one message on the reference cluster, inside a host and between hosts."""


def parts_s(
    compute_s: float,
    ranks: int,
    blocks: int,
    halo_bytes: float,
    gradient_bytes: float,
    latency_s: float,
    bytes_per_s: float,
) -> dict[str, float]:
    """Return the seconds of a step in strips by their parts, for a rank in the middle.

    A rank sends one message after another. The mean over the image, with few bytes, and the
    gradients each go around a ring.

    Args:
        compute_s: what one device takes.
        ranks: number of strips, at least 3.
        blocks: number of blocks, each of which needs a halo.
        halo_bytes: from one rank to one neighbour, before one block.
        gradient_bytes: of all parameters.
        latency_s: of one message.
        bytes_per_s: bandwidth of a rank's link.
    """
    # To two neighbours, forward and backward.
    halos = 2 * 2 * blocks
    ring_steps = 2 * (ranks - 1)
    return {
        "arithmetic": compute_s / ranks,
        "halos": halos * halo_bytes / bytes_per_s,
        "gradients": ring_steps * gradient_bytes / ranks / bytes_per_s,
        "latency": (halos + 2 * ring_steps) * latency_s,
    }


def convnext_step(
    size: int, *, depths: Sequence[int], dims: Sequence[int], ranks: int = 8
) -> dict[str, Any]:
    """Return the arguments of ``parts_s`` for one image of size × size pixels, in bfloat16.

    What depends on the link is left out.
    """
    stages = spatial.convnext_stages(size, size, depths, dims)
    # Of a block: two 1 x 1 convolutions and the depthwise one; norms and downsampling are left out.
    multiplications = sum(
        each.depth * (8 * each.channels**2 + 49 * each.channels) * each.height * each.width
        for each in stages
    )
    blocks = sum(depths)
    # There and back, in float32.
    sent = spatial.spatial_send_bytes(stages=stages, batch=1, neighbours=1)
    return {
        # Two operations each, in the forward pass, and twice as many backward.
        "compute_s": 6 * multiplications / H100_FLOPS_PER_S,
        "ranks": ranks,
        "blocks": blocks,
        # Half the rows and twice the channels: halos are equally large in each stage.
        "halo_bytes": sent / (2 * blocks) * BFLOAT16_BYTES / 4,
        "gradient_bytes": BFLOAT16_BYTES
        * spatial.convnext_parameters(depths, dims, num_classes=1000),
    }


def table_ms(
    seconds: Callable[..., float] | None,
    sizes: Sequence[int],
    links: Mapping[str, float],
    *,
    depths: Sequence[int],
    dims: Sequence[int],
) -> pandas.DataFrame:
    """Return the milliseconds of a step on one device, in strips, and by part, for each case.

    ``data parallel`` is for one of the images when each rank takes one of its own.

    Args:
        seconds: the learner's formula for the step in strips; by default the sum of the parts.
        sizes: height and width of each image.
        links: bandwidths in bytes a second, by name.
        depths: blocks of each stage.
        dims: channels of each stage.
    """
    rows: dict[str, dict[str, float]] = {}
    for size in sizes:
        for name, bytes_per_s in links.items():
            step = convnext_step(size, depths=depths, dims=dims)
            step |= {"latency_s": LATENCY_S, "bytes_per_s": bytes_per_s}
            parts = parts_s(**step)
            strips_s = seconds(**step) if seconds else sum(parts.values())
            label = f"{len(rows) + 1}: {size:,} pixels, {name}"
            # Eight images at once share one ring of the gradients.
            ring_s = parts["gradients"] + 2 * (step["ranks"] - 1) * LATENCY_S
            shared_s = (step["compute_s"] + ring_s) / step["ranks"]
            rows[label] = {
                "one device": step["compute_s"],
                "strips": strips_s,
                "data parallel": shared_s,
                **parts,
            }
    return 1e3 * pandas.DataFrame.from_dict(rows, orient="index")
