"""Explorer of lab 5: bytes and time along both axes of a mesh, by the number of ranks along tp."""

from collections.abc import Mapping
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import labkit
from labkit.plots import style
from labkit.plots import two_dim as plots
from labkit.runs.result import RunResult
from labkit.theory import two_dim as theory
from labkit.theory.emulated import GIGA, Emulated, slow_motion_factor
from labkit.theory.fsdp import FLOAT_BYTES
from labkit.theory.sizes import readable_bytes
from labkit.theory.two_dim import H100_FLOPS_PER_S, NVLINK_BYTES_PER_S
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

TEXT_TOKENS = 2048
# A run trains a stack of this width, on samples of 8 tokens, in place of the chosen one.
RUN_DIM, SAMPLE_TOKENS = 64, 8
TP_SIZES = (1, 2, 4, 8, 16)
OVERLAPS = {"are waited for": False, "travel meanwhile": True}


class TwoAxesExplorer(Explorer):
    """A stack of three MLPs on H100s; a run trains a small one with links in slow motion."""

    title = "How many ranks share a matrix?"
    controls: ClassVar = {
        "ranks": Control("GPUs", (2, 4, 8, 64), 8),
        "host": Control("GPUs in a host", (4, 8), 4),
        "tp": Control("along tp", TP_SIZES, 4),
        "dim": Control("width", (1024, 4096, 16384), 4096),
        "tokens": Control("tokens in a step", (16384, 32768, 131072), 131072),
        "card_gb_per_s": Control("card of each GPU, GB/s", (10, 50, 400), 50),
        "overlap": Control("messages along data", OVERLAPS, False),
    }
    formulas = (
        theory.cluster_links,
        theory.cluster_steps,
        theory.step_seconds,
        theory.seconds_after_overlap,
    )
    tolerances: ClassVar = {"step_ms": 0.15}
    run_tip = "measure this on real ranks that wait for the chosen times in slow motion"

    def predict(self, **chosen: Any) -> dict[str, float]:
        ranks, tp, sizes = chosen["ranks"], chosen["tp"], _tp_sizes(**chosen)
        if tp not in sizes:
            raise ValueError(
                f"{ranks} ranks with tp = {tp} cannot share {chosen['tokens'] // TEXT_TOKENS} "
                f"texts of {TEXT_TOKENS} tokens evenly: take tp {' or '.join(map(str, sizes))}"
            )
        axes = {"data": ranks // tp, "tp": tp}
        # Bytes of a run are those of its small stack.
        sent = theory.step_collectives_by_axis(theory.mlp_pairs(RUN_DIM), TEXT_TOKENS, **axes)
        counts = {name: count for name, count in sent.items() if name.endswith("_count")}
        return {**counts, "step_ms": 1e3 * sum(_steps(**chosen)[1][tp].values())}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        ranks, tp, counted, took_s = chosen["ranks"], chosen["tp"], None, 0.0
        if result is not None:
            handed = {name: result.value(name) for name in result.summary() if "/" in name}
            small = theory.axis_wire_bytes(handed, data=ranks // tp, tp=tp)
            larger = _size_ratio(**chosen)
            counted = {str(tp): {axis: larger * size for axis, size in small.items()}}
            took_s = self.measured_value("step_ms", result) / 1e3
        by_tp, seconds = _steps(**chosen)
        wires = {str(each): parts for each, parts in by_tp.items()}
        totals = {each: sum(parts.values()) for each, parts in seconds.items()}
        best = min(totals, key=lambda each: totals[each])
        margins = {"left": 0.09, "right": 0.985, "top": 0.86, "bottom": 0.21, "wspace": 0.25}
        sent, times = figure.subplots(1, 2, gridspec_kw=margins)
        xlabel = f"ranks along tp, of {ranks}"
        plots.traffic_by_axis(wires, counted, ax=sent, xlabel=xlabel)
        look: dict[str, Any] = {"measured_s": took_s, "ax": times}
        step_time_by_split(seconds, chosen=tp, xlabel=f"{xlabel}; bold: chosen", **look)
        sent.yaxis.label.set_fontsize(9)
        for ax in (sent, times):
            # Every bar has its number, and each tick takes time to draw.
            ax.locator_params(axis="y", nbins=3)
        along_tp, along_data = (readable_bytes(wires[str(tp)][axis]) for axis in ("tp", "data"))
        words = (
            f"{ranks} ranks, {tp} along tp: a rank sends {along_tp} along tp and {along_data} "
            "along data in a step, which is predicted to take "
            f"{style.duration_text(totals[tp])}; "
            f"least is {style.duration_text(totals[best])} with {best} along tp"
        )
        return f"{words}; it took {style.duration_text(took_s)}" if took_s else words

    def refusal_reason(self, **chosen: Any) -> str:
        if refusal := self.too_many_ranks_text(chosen["ranks"]):
            return refusal
        if chosen["overlap"]:
            return (
                "on the CPU FSDP waits for its messages, so that they travel meanwhile is theory "
                "here: to run it, choose that they are waited for"
            )
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        # As many times fewer tokens as the width is smaller: both axes keep their share of a step.
        batch = chosen["tokens"] * RUN_DIM // chosen["dim"] // SAMPLE_TOKENS
        how: dict[str, Any] = {"tp": chosen["tp"], "dim": RUN_DIM, "batch": batch, "steps": 1}
        return labkit.run("two_dim", nproc=chosen["ranks"], emulate=_slow_links(**chosen), **how)


def _slow_links(**chosen: Any) -> Emulated:
    """Return H100s with the chosen cards in slow motion, for the small stack of a run."""
    ranks = chosen["ranks"]
    # What all ranks really compute on two cores must be little beside what they wait for.
    step_s = sum(_steps(**chosen)[1][chosen["tp"]].values())
    slower = slow_motion_factor(step_s / max(1, ranks / 2))
    pairs = theory.mlp_pairs(chosen["dim"])
    # A third of a step's operations are those of the forward pass.
    operations = theory.step_flops_per_token(pairs) * chosen["tokens"] / 3 / len(pairs)
    pace = slower * _size_ratio(**chosen)
    return Emulated(
        gb_per_s=NVLINK_BYTES_PER_S / GIGA / pace,
        between_gb_per_s=chosen["card_gb_per_s"] / pace,
        ranks_per_host=chosen["host"],
        forward_ms=1e3 * slower * operations / H100_FLOPS_PER_S,
        hardware=f"H100s, {chosen['host']} a host, cards of {chosen['card_gb_per_s']} GB/s",
        slower=slower,
    )


def _size_ratio(**chosen: Any) -> float:
    """Return how often larger the chosen stack's bfloat16 messages are than those of a run."""
    return (chosen["dim"] / RUN_DIM) ** 2 * theory.BFLOAT16_BYTES / FLOAT_BYTES


def _tp_sizes(**chosen: Any) -> list[int]:
    return theory.valid_tp_sizes(chosen["ranks"], chosen["tokens"] // TEXT_TOKENS, TP_SIZES)


def _steps(**chosen: Any) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """Return bytes on the wire by axis, and seconds by part, by size of tp."""
    wires, seconds = theory.cluster_steps(
        theory.mlp_pairs(chosen["dim"]),
        chosen["tokens"],
        _tp_sizes(**chosen),
        ranks=chosen["ranks"],
        host=chosen["host"],
        card_bytes_per_s=GIGA * chosen["card_gb_per_s"],
    )
    hidden = {
        tp: theory.seconds_after_overlap(parts, chosen["overlap"]) for tp, parts in seconds.items()
    }
    return wires, hidden


def step_time_by_split(
    seconds: Mapping[int, style.Numbers],
    *,
    chosen: int,
    measured_s: float = 0.0,
    ax: Axes | None = None,
    xlabel: str = "ranks along tp",
) -> Axes:
    """Draw the predicted time of a step by tp, with the chosen size in bold and the best one named.

    ``seconds`` are of ``compute``, ``tp`` and ``data`` by size of tp; ``measured_s`` is a bar
    beside the chosen size.
    """
    ax = style.make_axes(ax)
    totals_s = {tp: sum(parts.values()) for tp, parts in seconds.items()}
    # A tie goes to the smaller size of tp.
    best, highest_s = min(totals_s, key=totals_s.__getitem__), max(*totals_s.values(), measured_s)
    (unit, size), legend = style.time_unit(highest_s), plots.TIME_LABELS
    for column, (tp, parts) in enumerate(seconds.items()):
        heights = {part: parts[part] / size for part in plots.TIME_COLOURS}
        top = style.draw_stack(ax.bar, column, heights, plots.TIME_COLOURS, 0.5)
        ax.bar(column, top, 0.5, fill=False, **style.FRAME_STYLE)
        text = "best: " * (tp == best) + style.short_number_text(top)
        said = ax.text(column, top, text, fontsize=8, **style.ON_TOP)
        if tp == chosen and measured_s:
            # The measured bar takes the space to the right.
            said.set(x=column + 0.25, ha="right")
            height, legend = measured_s / size, legend | {"measured": style.GREEN}
            ax.bar(column + 0.37, height, 0.2, color=style.GREEN)
            number = style.short_number_text(height)
            ax.text(column + 0.29, height, number, va="bottom", fontsize=8)
    ax.set_xticks(range(len(seconds)), list(map(str, seconds)))
    ax.get_xticklabels()[list(seconds).index(chosen)].set_fontweight("bold")
    ax.set(ylabel=f"one step of a rank, {unit}", xlabel=xlabel, ylim=(0, 1.12 * highest_s / size))
    style.add_legend_above(ax, 4, style.legend_patches(legend), **style.SMALL_LEGEND)
    return ax
