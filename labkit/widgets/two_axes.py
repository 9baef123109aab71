"""Explorer of lab 5: bytes and time along both axes of a mesh, by the number of ranks along tp."""

from collections.abc import Mapping
from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit import requirements
from labkit.plots import style
from labkit.plots import two_dim as plots
from labkit.runs.result import RunResult
from labkit.theory import collectives
from labkit.theory import two_dim as theory
from labkit.theory.collectives import AlphaBeta
from labkit.theory.sizes import readable_bytes
from labkit.widgets.explorer import Control, Explorer, Measured, Numbers

# Until a run has measured it: an H100 in bfloat16, at 40 % of its data sheet.
FLOPS_PER_S = 400e12
SAMPLE_TOKENS = 8
# A run takes no step with more operations.
MAX_RUN_OPERATIONS = 2e10
LINK_GB_PER_S = (10, 50, 400, 450)
TP_SIZES = (1, 2, 4, 8, 16)
OVERLAPS = {"are waited for": False, "travel meanwhile": True}


class TwoAxesExplorer(Explorer):
    """Lab 5's stack of three MLPs; a run measures this machine's arithmetic and links.

    Times are predicted too short where ranks share a core, since they wait for each other's turn.
    """

    title = "How many ranks share a matrix?"
    controls: ClassVar = {
        "ranks": Control("ranks", (2, 4, 16, 64), 4),
        "tp": Control("along tp", TP_SIZES, 2),
        "dim": Control("width", (64, 128, 256, 4096), 128),
        "tokens": Control("tokens in a step", (128, 512, 2048, 131072), 512),
        "tp_gb_per_s": Control("along tp, GB/s", LINK_GB_PER_S, 450),
        "data_gb_per_s": Control("along data, GB/s", LINK_GB_PER_S, 50),
        "overlap": Control("messages along data", OVERLAPS, False),
    }
    formulas = (
        theory.step_collectives_by_axis,
        theory.axis_wire_bytes,
        theory.step_seconds,
        theory.seconds_after_overlap,
    )
    tolerances: ClassVar = {"passes_ms": 1 / 3}

    def predict(self, **chosen: Any) -> dict[str, float]:
        ranks, tp, splits = chosen["ranks"], chosen["tp"], _splits(**chosen)
        if tp not in splits:
            raise ValueError(
                f"{ranks} ranks with tp = {tp} cannot share "
                f"{chosen['tokens'] // SAMPLE_TOKENS} samples evenly: "
                f"take tp {' or '.join(map(str, splits))}"
            )
        tokens, axes = splits[tp]
        pairs = theory.mlp_pairs(chosen["dim"])
        return dict(theory.step_collectives_by_axis(pairs, tokens, **axes))

    def predict_from_run(self, result: RunResult, **chosen: Any) -> dict[str, float]:
        costs, _ = _costs_from_run(result, **chosen)
        return {"passes_ms": 1e3 * sum(_step_seconds(costs, **chosen)[chosen["tp"]].values())}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        ranks, tp = chosen["ranks"], chosen["tp"]
        (costs, text), counted, took_s = _costs_from_controls(**chosen), None, 0.0
        if result is not None:
            costs, text = _costs_from_run(result, **chosen)
            handed = {name: result.value(name) for name in result.summary() if "/" in name}
            counted = {str(tp): theory.axis_wire_bytes(handed, data=ranks // tp, tp=tp)}
            took_s = result.value("passes_ms") / 1e3
        wires, pairs = {}, theory.mlp_pairs(chosen["dim"])
        for each, (tokens, axes) in _splits(**chosen).items():
            expected = theory.step_collectives_by_axis(pairs, tokens, **axes)
            wires[str(each)] = theory.axis_wire_bytes(expected, **axes)
        seconds = _step_seconds(costs, **chosen)
        totals = {each: sum(parts.values()) for each, parts in seconds.items()}
        best = min(totals, key=lambda each: totals[each])
        margins = {"left": 0.09, "right": 0.985, "top": 0.79, "bottom": 0.21, "wspace": 0.25}
        sent, times = figure.subplots(1, 2, gridspec_kw=margins)
        xlabel = f"ranks along tp, of {ranks}"
        plots.traffic_by_axis(wires, counted, ax=sent, xlabel=xlabel)
        look: dict[str, Any] = {"measured_s": took_s, "ax": times, "xlabel": xlabel}
        plots.step_time_by_split(seconds, chosen=tp, **look)
        sent.yaxis.label.set_fontsize(9)
        for ax in (sent, times):
            # Every bar has its number, and each tick takes time to draw.
            ax.locator_params(axis="y", nbins=3)
        figure.text(0.01, 0.99, text, fontsize=9, va="top")
        along_tp, along_data = (readable_bytes(wires[str(tp)][axis]) for axis in ("tp", "data"))
        words = (
            f"{ranks} ranks, {tp} along tp: a rank sends {along_tp} along tp and {along_data} "
            "along data in a step, which is predicted to take "
            f"{style.duration_text(totals[tp])}; "
            f"least is {style.duration_text(totals[best])} with {best} along tp"
        )
        return f"{words}; it took {style.duration_text(took_s)}" if took_s else words

    def refusal_reason(self, **chosen: Any) -> str:
        most, operations = 2 * len(requirements.usable_cores()), _step_operations(**chosen)
        if chosen["ranks"] > most:
            return (
                f"{chosen['ranks']} ranks are theory here: "
                f"to run it, take {most} or fewer on this machine's cores"
            )
        if operations > MAX_RUN_OPERATIONS:
            return (
                f"a step of {operations:.0e} operations is theory here: "
                "to run it, take a smaller width or fewer tokens"
            )
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        sizes = {name: chosen[name] for name in ("tp", "dim")}
        sizes["batch"] = chosen["tokens"] // SAMPLE_TOKENS
        return labkit.run("two_dim", nproc=chosen["ranks"], steps=1, costs=True, **sizes)


def _splits(**chosen: Any) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return, by size of tp, the tokens of a tp group and the sizes of the mesh's axes."""
    ranks, tokens = chosen["ranks"], chosen["tokens"]
    sizes = theory.valid_tp_sizes(ranks, tokens // SAMPLE_TOKENS, TP_SIZES)
    return {tp: (tokens * tp // ranks, {"data": ranks // tp, "tp": tp}) for tp in sizes}


def _step_seconds(costs: Mapping[str, Any], **chosen: Any) -> dict[int, dict[str, float]]:
    """Return the seconds of each part of a rank's step, by size of tp."""
    times, pairs = {}, theory.mlp_pairs(chosen["dim"])
    for tp, (tokens, axes) in _splits(**chosen).items():
        seconds = theory.step_seconds(pairs, tokens, **axes, **costs)
        times[tp] = theory.seconds_after_overlap(seconds, chosen["overlap"])
    return times


def _step_operations(**chosen: Any) -> float:
    return theory.step_flops_per_token(theory.mlp_pairs(chosen["dim"])) * chosen["tokens"]


def _costs_from_controls(**chosen: Any) -> tuple[dict[str, Any], str]:
    """Return the arguments of ``theory.step_seconds`` and their text."""
    links, texts = {}, []
    for axis in ("tp", "data"):
        gb_per_s = chosen[f"{axis}_gb_per_s"]
        links[axis] = AlphaBeta(0.0, 1e-9 / gb_per_s)
        texts.append(f"along {axis} {gb_per_s} GB/s")
    speed = f"a rank does {FLOPS_PER_S / 1e12:.0f} TFLOP/s (assumed)"
    text = f"costs as chosen: {', '.join(texts)}; {speed}"
    return {"flops_per_s": FLOPS_PER_S, "links": links}, text


def _costs_from_run(result: RunResult, **chosen: Any) -> tuple[dict[str, Any], str]:
    """Return the arguments of ``theory.step_seconds`` and their text."""
    found = {}
    for axis, ranks in (("tp", chosen["tp"]), ("data", chosen["ranks"] // chosen["tp"])):
        if ranks > 1:
            # The run times four all-reduces of each size in a row.
            times_s = {size: result.value(f"{axis}_{size}_ms") / 4e3 for size in (2**12, 2**20)}
            link = collectives.fit_alpha_beta(times_s)
            handed = collectives.collective_wire_bytes("all_reduce", 1, ranks)
            found[axis] = AlphaBeta(link.alpha_s, link.beta_s_per_byte / handed)
    # An axis of one rank has no link to measure and takes the other's.
    links = {axis: found.get(axis) or next(iter(found.values())) for axis in ("tp", "data")}
    operations = _step_operations(**chosen) / chosen["ranks"]
    flops_per_s = 1e3 * operations / result.value("alone_ms")
    texts = [f"a rank {style.short_number_text(flops_per_s / 1e9)} GFLOP/s"]
    for axis, link in links.items():
        beta_text = style.short_number_text(1e12 * link.beta_s_per_byte)
        texts.append(f"along {axis} {1e6 * link.alpha_s:,.0f} µs and {beta_text} µs/MB")
    text = f"costs measured by this run: {', '.join(texts)}"
    return {"flops_per_s": flops_per_s, "links": links}, text
