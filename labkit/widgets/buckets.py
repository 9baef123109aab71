"""Explorer of lab 4: what DDP's bucket size does to the messages of a backward pass."""

from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.plots import ddp as plots
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta
from labkit.widgets.explorer import Control, Explorer, Measured, Numbers

# The * is DDP's default, whose first bucket closes at 1 MiB.
BUCKET_SIZES_MB = {
    "one gradient": 0.0001,
    "0.1 MiB": 0.1,
    "1 MiB": 1.0,
    "5 MiB": 5.0,
    "25 MiB*": 25.0,
    "100 MiB": 100.0,
}
NETWORKS = {"100 × 64": (100, 64), "24 × 256": (24, 256), "4 × 1,000": (4, 1000)}
CARRIERS = {"the computing core": False, "a network card": True}


class BucketExplorer(Explorer):
    """A chain of linear layers under DDP; a run measures what a message costs on this machine."""

    title = "Which gradients travel together, and what hides them?"
    controls: ClassVar = {
        "network": Control("layers", NETWORKS, (100, 64)),
        "bucket_mb": Control("bucket", BUCKET_SIZES_MB, 0.1),
        "alpha_us": Control("alpha, µs a message", (5, 20, 100, 400), 100),
        "gb_per_s": Control("1 / beta, GB/s", (1, 2, 10, 100), 2),
        "backward_ms": Control("arithmetic, ms", (2, 5, 20), 5),
        "hidden": Control("messages are carried by", CARRIERS, False),
    }
    formulas = (theory.bucket_plan, theory.bucket_transfer_times, theory.smallest_bucket_bytes)
    tolerances: ClassVar = {"backward_ms": 1 / 3}
    size = (8.5, 3.4)

    def predict(self, **chosen: Any) -> dict[str, float]:
        layers, dim = chosen["network"]
        buckets = theory.chain_buckets(dim, chosen["bucket_mb"], layers=layers)
        size = sum(sum(each.values()) for each in buckets)
        return {"all_reduce_count": len(buckets), "all_reduce_bytes": size}

    def predict_from_run(self, result: RunResult, **chosen: Any) -> dict[str, float]:
        return {"backward_ms": 1e3 * _backward_end_s(**chosen | _costs_from_run(result))}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        # As soon as a run has measured costs, they replace the chosen ones.
        drawn, measured_s, source = chosen, 0.0, "costs as chosen"
        if result is not None:
            drawn = chosen | _costs_from_run(result)
            measured_s, source = result.value("backward_ms") / 1e3, "costs measured by this run"
        margins = {"left": 0.115, "right": 0.985, "top": 0.8, "bottom": 0.21, "wspace": 0.32}
        line, sizes = figure.subplots(1, 2, width_ratios=(1.7, 1), gridspec_kw=margins)
        backward_s, hidden = drawn["backward_ms"] / 1e3, drawn["hidden"]
        journeys = _bucket_transfer_times(**drawn)
        plots.backward_timeline(journeys, backward_s, hidden=hidden, measured_s=measured_s, ax=line)
        line.locator_params(axis="x", nbins=5)
        parts = {}
        for name, size in BUCKET_SIZES_MB.items():
            exposed_s = _backward_end_s(**drawn | {"bucket_mb": size}) - backward_s
            parts[name] = (backward_s, exposed_s)
            if size == chosen["bucket_mb"]:
                label = name
        plots.backward_time_by_bucket_size(parts, label, measured_s=measured_s, ax=sizes)
        sizes.set_xlabel("backward pass, ms (*: first bucket at 1 MiB)", fontsize=8)
        costs = f"alpha {drawn['alpha_us']:,.0f} µs, 1 / beta {drawn['gb_per_s']:.2g} GB/s"
        figure.text(0.01, 0.985, f"{source}: {costs}", fontsize=9, va="top")
        end_ms, exposed_ms = 1e3 * sum(parts[label]), 1e3 * parts[label][1]
        words = (
            f"{style.count_text(len(journeys), 'bucket')}, "
            f"{predicted['all_reduce_bytes'] / 1e6:.3g} MB; "
            f"the backward pass is predicted to take {style.short_number_text(end_ms)} ms, "
            f"of which {style.short_number_text(exposed_ms)} ms are exposed messages"
        )
        if measured_s:
            words += f"; it took {style.short_number_text(1e3 * measured_s)} ms"
        return words

    def launch(self, **chosen: Any) -> RunResult:
        layers, dim = chosen["network"]
        sizes = {"dim": dim, "layers": layers, "batch": 32, "bucket_mb": chosen["bucket_mb"]}
        return labkit.run("ddp_compile", nproc=2, mode="ddp", steps=8, costs=True, **sizes)


def _bucket_transfer_times(**drawn: Any) -> list[tuple[float, float]]:
    """Return when each bucket leaves and arrives, in seconds."""
    layers, dim = drawn["network"]
    network = AlphaBeta(drawn["alpha_us"] / 1e6, 1e-9 / drawn["gb_per_s"])
    backward_s, how = drawn["backward_ms"] / 1e3, {"network": network, "hidden": drawn["hidden"]}
    size_mb = drawn["bucket_mb"]
    return theory.backward_transfer_times(dim, layers, size_mb, backward_s=backward_s, **how)


def _backward_end_s(**drawn: Any) -> float:
    return max(drawn["backward_ms"] / 1e3, _bucket_transfer_times(**drawn)[-1][1])


def _costs_from_run(result: RunResult) -> dict[str, float]:
    """Return the costs that a run measured, by the names of the controls."""
    # The run sends the same bytes in one message and in 64.
    pieces_s = {count: [result.value(f"pieces_{count}_ms") / 1e3] for count in (1, 64)}
    network = theory.fit_from_message_counts(pieces_s, int(result.value("all_reduce_bytes")))
    return {
        # A disturbed round may push the fitted line below 0.
        "alpha_us": max(0.0, 1e6 * network.alpha_s),
        "gb_per_s": 1e-9 / max(1e-15, network.beta_s_per_byte),
        "backward_ms": result.value("alone_ms"),
    }
