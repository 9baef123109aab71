"""Lab 4's time lines of backward passes to diagnose, and its formulas of a compiled step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from labkit.plots import style
from labkit.theory import ddp, emulated_steps
from labkit.theory.emulated import Emulated

Span = tuple[float, float]
NEAR = 1.02
"""A size of bucket is as good as the best if its pass takes at most so many times as long."""


@dataclass(frozen=True)
class BackwardLine:
    """A backward pass whose layers take equal time, each with one gradient of ``layer_mib``.

    ``order`` are the layers as they fill buckets, and ``ready`` as their gradients are ready: from
    the last to the first. Buckets close at ``cap_mib``, the first at ``first_mib``.
    """

    layers: int
    layer_mib: float
    alpha_ms: float
    beta_ms: float  # for each MiB
    cap_mib: float
    first_mib: float
    order: tuple[int, ...]
    backward_ms: float = 160.0

    def buckets(self, cap_mib: float | None = None) -> list[list[int]]:
        """Return the layers in each bucket, as drawn, or with another size for all buckets."""
        sizes = [round(self.layer_mib * ddp.MIB)] * self.layers
        given = (self.cap_mib, self.first_mib) if cap_mib is None else (cap_mib, cap_mib)
        places = ddp.bucket_plan(sizes, *given)
        return [[self.order[place] for place in bucket] for bucket in places]

    def ready_ms(self, layer: int) -> float:
        """Return when the gradient of a layer is ready; layer 1 is the last."""
        return self.backward_ms * (self.layers + 1 - layer) / self.layers

    def messages(self, cap_mib: float | None = None) -> list[Span]:
        """Return when each bucket leaves and arrives, in ms."""
        buckets = self.buckets(cap_mib)
        full_ms = [max(map(self.ready_ms, bucket)) for bucket in buckets]
        takes_ms = [
            self.alpha_ms + self.beta_ms * self.layer_mib * len(bucket) for bucket in buckets
        ]
        return ddp.bucket_transfer_times(full_ms, takes_ms)

    def end_ms(self, cap_mib: float | None = None) -> float:
        """Return when the last bucket arrives."""
        return self.messages(cap_mib)[-1][1]

    def best_ms(self) -> float:
        """Return the earliest end that any size of bucket leads to."""
        return min(self.end_ms(self.layer_mib * count) for count in range(1, self.layers + 1))

    @property
    def late_bucket(self) -> int | None:
        """The bucket for which the wire is idle longest while gradients are ready, if any."""
        free_ms, idle = 0.0, list[float]()
        waiting = set(self.order)
        for (leaves_ms, arrives_ms), bucket in zip(self.messages(), self.buckets(), strict=True):
            first_ready_ms = min(map(self.ready_ms, waiting))
            idle.append(leaves_ms - max(free_ms, first_ready_ms))
            free_ms = arrives_ms
            waiting -= set(bucket)
        longest = max(idle)
        return idle.index(longest) if longest > 0 else None


def _chain_order(layers: int) -> tuple[int, ...]:
    return tuple(range(layers, 0, -1))


LINES = {
    "A": BackwardLine(8, 4, 10, 1, cap_mib=25, first_mib=1, order=_chain_order(8)),
    "B": BackwardLine(16, 0.5, 12, 4, cap_mib=0.5, first_mib=0.5, order=_chain_order(16)),
    "C": BackwardLine(8, 2, 1, 5, cap_mib=4, first_mib=4, order=(1, *_chain_order(8)[:-1])),
}


def draw(caps_mib: Mapping[str, float | None] | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the time lines on a common axis, as given, or with other sizes of buckets."""
    ax = style.make_axes(ax, 8.5, 1.3 + 1.1 * len(LINES))
    ax.set_title("three backward passes, by the formula", fontsize=10, loc="left", pad=22)
    colours = {
        "backward": style.PHASE_COLOURS["backward"],
        "all_reduce": style.COLLECTIVE_COLOURS["all_reduce"],
        "exposed": style.EXPOSURE_COLOUR,
    }
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
    labels, ends = dict[float, str](), list[float]()
    for row, (name, line) in enumerate(LINES.items()):
        top, cap_mib = 2.4 * row, (caps_mib or {}).get(name)
        layer_ms = line.backward_ms / line.layers
        caps_text = f"{cap_mib or line.cap_mib:g} MiB"
        if not cap_mib and line.first_mib != line.cap_mib:
            caps_text = f"{line.first_mib:g}, then {caps_text}"
        labels |= {
            top: f"{name}: layers of {line.layer_mib:g} MiB,\ncap {caps_text}",
            top + 1: f"alpha {line.alpha_ms:g} ms, beta {line.beta_ms:g} ms/MiB",
        }
        for layer in line.order:
            left = line.ready_ms(layer) - layer_ms
            ax.broken_barh([(left, layer_ms)], (top - 0.4, 0.8), color=colours["backward"], **look)
            ax.text(left + layer_ms / 2, top, f"{layer}", fontsize=8, **style.CENTRED)
        spans = line.messages(cap_mib)
        for (leaves, arrives), bucket in zip(spans, line.buckets(cap_mib), strict=True):
            span = (leaves, arrives - leaves)
            ax.broken_barh([span], (top + 0.6, 0.8), color=colours["all_reduce"], **look)
            text = f"{bucket[0]}–{bucket[-1]}" if len(bucket) > 2 else ",".join(map(str, bucket))
            ax.text((leaves + arrives) / 2, top + 1, text, fontsize=8, **style.CENTRED)
        ends.append(spans[-1][1])
        exposed = (line.backward_ms, ends[-1] - line.backward_ms)
        ax.broken_barh([exposed], (top + 1.42, 0.14), color=colours["exposed"])
        ax.text(ends[-1], top + 1, f" {ends[-1]:.0f} ms", va="center", fontsize=9)
    ax.set(xlim=(0, 300), ylim=(2.4 * len(LINES) - 0.45, -0.6))
    ax.set_yticks(list(labels), list(labels.values()), fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("time since the backward pass began, ms")
    style.add_legend_above(ax, len(colours), style.legend_patches(colours), **style.SMALL_LEGEND)
    return ax


def compiled_steps_ms(
    hardware: Emulated, ranks: int, *, dim: int, layers: int, bucket_mb: float
) -> dict[str, float]:
    """Return the milliseconds of DDP's step of a LinearChain, by how it is compiled.

    As one graph, all messages follow the backward pass. ``one_bucket_ms`` is that with one message.
    """
    chain: dict[str, Any] = {"dim": dim, "layers": layers}

    def eager_ms(size_mb: float, way: ddp.CompileMode) -> float:
        step_s = emulated_steps.ddp_step_s(hardware, ranks, bucket_mb=size_mb, way=way, **chain)
        return 1e3 * step_s

    plan = ddp.chain_buckets(dim, bucket_mb, layers=layers, way="compiled")
    sent_s = [hardware.collective_s("all_reduce", sum(each.values()), ranks) for each in plan]
    computes_ms = layers * (hardware.forward_ms + hardware.unit_backward_ms)
    return {
        "not_compiled_ms": eager_ms(bucket_mb, "eager"),
        "cut_ms": eager_ms(bucket_mb, "compiled"),
        "whole_ms": computes_ms + 1e3 * sum(sent_s),
        "one_bucket_ms": eager_ms(1e6, "eager"),
    }
