"""Ranks on a mesh of two axes: bytes and time along each by the number of ranks that share a matrix."""

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
from labkit.widgets.explorer import Control, Explorer

FLOPS_PER_S = 400e12
"""Operations of a rank in a second until a run has measured them: an H100's in bfloat16, at 40 % of its data sheet."""
CORE_SHARING_NOTE = "ranks that share a core wait for each other's turn at every message: expect more than predicted"
SAMPLE_TOKENS = 8  # tokens of a sample
MAX_RUN_OPERATIONS = 2e10  # of a step that a run may take
LINK_GB_PER_S = (10, 50, 400, 450)
TP_SIZES = (1, 2, 4, 8, 16)


class TwoAxesExplorer(Explorer):
    """Lab 5's stack of three MLPs. Arithmetic and links of this machine are measured by the run.

    Bytes come out equal. Time need not, where ranks share a core: see ``CROWDED``.
    """

    title = "How many ranks share a matrix?"
    controls: ClassVar = {
        "ranks": Control("ranks", (2, 4, 16, 64), 4),
        "tp": Control("along tp", TP_SIZES, 2),
        "dim": Control("width", (64, 128, 256, 4096), 128),
        "tokens": Control("tokens in a step", (128, 512, 2048, 131072), 512),
        "tp_gb_per_s": Control("along tp, GB/s", LINK_GB_PER_S, 450),
        "data_gb_per_s": Control("along data, GB/s", LINK_GB_PER_S, 50),
        "overlap": Control(
            "messages along data", {"are waited for": False, "travel meanwhile": True}, False
        ),
    }
    formulas = (
        theory.step_collectives_by_axis,
        theory.axis_wire_bytes,
        theory.step_seconds,
        theory.seconds_after_overlap,
    )
    tolerances: ClassVar = {"passes_ms": 1 / 3}
    size = (8.5, 3.6)

    def predict(self, **chosen: Any) -> dict[str, float]:
        ranks, tp = chosen["ranks"], chosen["tp"]
        possible = theory.valid_tp_sizes(ranks, chosen["tokens"] // SAMPLE_TOKENS, TP_SIZES)
        if tp not in possible:
            raise ValueError(
                f"{ranks} ranks with tp = {tp} cannot share {chosen['tokens'] // SAMPLE_TOKENS} samples evenly: "
                f"take tp {' or '.join(map(str, possible))}"
            )
        axes = {"data": ranks // tp, "tp": tp}
        return dict(
            theory.step_collectives_by_axis(
                theory.mlp_pairs(chosen["dim"]), chosen["tokens"] * tp // ranks, **axes
            )
        )

    def predict_from_run(self, result: RunResult, **chosen: Any) -> dict[str, float]:
        return {
            "passes_ms": 1e3
            * sum(
                _step_seconds_by_split(_costs_from_run(result, **chosen), **chosen)[
                    chosen["tp"]
                ].values()
            )
        }

    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        costs = _costs_from_run(result, **chosen) if result else _costs_from_controls(**chosen)
        wires, seconds = _wire_bytes_by_split(**chosen), _step_seconds_by_split(costs, **chosen)
        ranks, tp = chosen["ranks"], chosen["tp"]
        totals = {each: sum(parts.values()) for each, parts in seconds.items()}
        best = min(totals, key=lambda each: totals[each])
        took_s = result.value("passes_ms") / 1e3 if result else None
        margins = {"left": 0.09, "right": 0.985, "top": 0.79, "bottom": 0.21, "wspace": 0.25}
        sent, times = figure.subplots(1, 2, gridspec_kw=margins)
        counted = {str(tp): _wire_bytes_from_run(result, **chosen)} if result else None
        xlabel = f"ranks along tp, of {ranks}"
        plots.traffic_by_axis(
            {str(each): parts for each, parts in wires.items()}, counted, ax=sent, xlabel=xlabel
        )
        plots.step_time_by_split(
            seconds, chosen=tp, best=best, measured_s=took_s, ax=times, xlabel=xlabel
        )
        sent.yaxis.label.set_fontsize(9)
        for ax in (sent, times):
            ax.locator_params(
                axis="y", nbins=3
            )  # every bar has its number, and each tick takes time to draw
        figure.text(
            0.01,
            0.99,
            _cost_text(costs, measured=result is not None, **chosen),
            fontsize=9,
            va="top",
        )
        crowded = result is not None and ranks > result.session["cores"] and result.device == "cpu"
        if crowded:
            figure.text(0.01, 0.94, CORE_SHARING_NOTE, fontsize=8, va="top", color=style.GREY)
        words = (
            f"{ranks} ranks, {tp} along tp: a rank sends {readable_bytes(wires[tp]['tp'])} along tp and "
            f"{readable_bytes(wires[tp]['data'])} along data in a step, which is predicted to take "
            f"{style.duration_text(totals[tp])}; least is {style.duration_text(totals[best])} with {best} along tp"
        )
        if took_s:
            words += f"; it took {style.duration_text(took_s)}" + (
                f" ({CORE_SHARING_NOTE})" if crowded else ""
            )
        return words

    def refusal_reason(self, **chosen: Any) -> str:
        most = 2 * len(requirements.usable_cores())
        if chosen["ranks"] > most:
            return f"{chosen['ranks']} ranks are theory here: to run it, take {most} or fewer on this machine's cores"
        operations = theory.step_flops_per_token(theory.mlp_pairs(chosen["dim"])) * chosen["tokens"]
        if operations > MAX_RUN_OPERATIONS:
            return f"a step of {operations:.0e} operations is theory here: to run it, take a smaller width or fewer tokens"
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        sizes = {
            "tp": chosen["tp"],
            "dim": chosen["dim"],
            "batch": chosen["tokens"] // SAMPLE_TOKENS,
        }
        return labkit.run("two_dim", nproc=chosen["ranks"], steps=1, costs=True, **sizes)


def _wire_bytes_by_split(**chosen: Any) -> dict[int, dict[str, float]]:
    """Bytes that a rank puts on the wire along each axis, by split."""
    pairs, ranks, tokens = theory.mlp_pairs(chosen["dim"]), chosen["ranks"], chosen["tokens"]
    wires = {}
    for tp in theory.valid_tp_sizes(ranks, tokens // SAMPLE_TOKENS, TP_SIZES):
        axes = {"data": ranks // tp, "tp": tp}
        wires[tp] = theory.axis_wire_bytes(
            theory.step_collectives_by_axis(pairs, tokens * tp // ranks, **axes), **axes
        )
    return wires


def _wire_bytes_from_run(result: RunResult, **chosen: Any) -> dict[str, float]:
    """The same of a run, from what was counted."""
    handed = {name: result.value(name) for name in result.summary() if "/" in name}
    return theory.axis_wire_bytes(handed, data=chosen["ranks"] // chosen["tp"], tp=chosen["tp"])


def _step_seconds_by_split(costs: Mapping[str, Any], **chosen: Any) -> dict[int, dict[str, float]]:
    """What a rank spends of a step, by split."""
    pairs, ranks, tokens = theory.mlp_pairs(chosen["dim"]), chosen["ranks"], chosen["tokens"]
    return {
        tp: theory.seconds_after_overlap(
            theory.step_seconds(pairs, tokens * tp // ranks, data=ranks // tp, tp=tp, **costs),
            chosen["overlap"],
        )
        for tp in theory.valid_tp_sizes(ranks, tokens // SAMPLE_TOKENS, TP_SIZES)
    }


def _costs_from_controls(**chosen: Any) -> dict[str, Any]:
    """What operations and bytes cost by the controls."""
    links = {axis: AlphaBeta(0.0, 1e-9 / chosen[f"{axis}_gb_per_s"]) for axis in ("tp", "data")}
    return {"flops_per_s": FLOPS_PER_S, "links": links}


def _costs_from_run(result: RunResult, **chosen: Any) -> dict[str, Any]:
    """What they cost in a run; an axis of one rank gets the other's link."""
    found = {}
    for axis, ranks in (("tp", chosen["tp"]), ("data", chosen["ranks"] // chosen["tp"])):
        if ranks > 1:
            times_s = {
                size: result.value(f"{axis}_{size}_ms") / 4e3 for size in (2**12, 2**20)
            }  # sent four times
            link = collectives.fit_alpha_beta(times_s)
            handed = collectives.collective_wire_bytes("all_reduce", 1, ranks)
            found[axis] = AlphaBeta(link.alpha_s, link.beta_s_per_byte / handed)
    links = {axis: found.get(axis) or next(iter(found.values())) for axis in ("tp", "data")}
    operations = (
        theory.step_flops_per_token(theory.mlp_pairs(chosen["dim"]))
        * chosen["tokens"]
        / chosen["ranks"]
    )
    return {"flops_per_s": 1e3 * operations / result.value("alone_ms"), "links": links}


def _cost_text(costs: Mapping[str, Any], *, measured: bool, **chosen: Any) -> str:
    """The costs in one line."""
    if not measured:
        links = ", ".join(
            f"along {axis} {chosen[f'{axis}_gb_per_s']} GB/s" for axis in ("tp", "data")
        )
        return f"costs as chosen: {links}; a rank does {costs['flops_per_s'] / 1e12:.0f} TFLOP/s (assumed)"
    links = ", ".join(
        f"along {axis} {1e6 * link.alpha_s:,.0f} µs and {style.short_number_text(1e12 * link.beta_s_per_byte)} µs/MB"
        for axis, link in costs["links"].items()
    )
    return f"costs measured by this run: a rank {style.short_number_text(costs['flops_per_s'] / 1e9)} GFLOP/s, {links}"
