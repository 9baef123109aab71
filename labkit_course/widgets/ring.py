"""Explorer of lab 0: what an all-reduce in a ring costs, in latency and in bytes."""

from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.plots import collectives as plots
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import collectives as theory
from labkit.theory.collectives import AlphaBeta
from labkit.theory.emulated import Emulated, slow_motion_factor
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "1 GiB": 2**30}
RANKS = (2, 4, 8, 64)
MAX_RUN_BYTES = 2**24


class RingExplorer(Explorer):
    """All-reduces in a ring; a run emulates the chosen network in slow motion."""

    title = "What does an all-reduce cost: latency, or bytes?"
    controls: ClassVar = {
        "ranks": Control("ranks", RANKS, 4),
        "size": Control("bytes together", SIZES, 2**20),
        "messages": Control("messages", (1, 8, 64), 1),
        "latency_us": Control("latency of a step, µs", (1, 10, 100), 10),
        "gb_per_s": Control("bandwidth, GB/s", (1, 10, 50, 450), 10),
    }
    formulas = (theory.ring_step_count, theory.collective_wire_bytes, theory.ring_s)
    tolerances: ClassVar = {"all_reduce_ms": 0.15}
    run_tip = "measure this on real ranks that wait for the chosen times in slow motion"
    size = (8.5, 3.4)

    def predict(self, **chosen: Any) -> dict[str, float]:
        seconds = _ring_network(**chosen).seconds(chosen["size"], messages=chosen["messages"])
        return {"all_reduce_ms": 1e3 * seconds}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        measured_s = self.measured_value("all_reduce_ms", result) / 1e3 if result else 0.0
        margins = {"left": 0.08, "right": 0.985, "top": 0.86, "bottom": 0.21, "wspace": 0.3}
        by_ranks, by_size = figure.subplots(1, 2, gridspec_kw=margins)
        messages, size = chosen["messages"], chosen["size"]
        parts = {}
        for ranks in RANKS:
            network = _ring_network(**chosen | {"ranks": ranks})
            parts[str(ranks)] = (messages * network.alpha_s, size * network.beta_s_per_byte)
        own = str(chosen["ranks"])
        plots.all_reduce_time_by_ranks(parts, own, measured_s=measured_s, ax=by_ranks)
        how: dict[str, Any] = {"messages": messages, "measured_s": measured_s, "ax": by_size}
        plots.predicted_time_by_size(_ring_network(**chosen), list(SIZES.values()), size, **how)
        latency_s, bytes_s = parts[own]
        steps = messages * theory.ring_step_count("all_reduce", chosen["ranks"])
        words = (
            f"{steps:,} steps of {style.duration_text(chosen['latency_us'] / 1e6)} and "
            f"{style.duration_text(bytes_s)} for the bytes are predicted to take "
            f"{style.duration_text(latency_s + bytes_s)}"
        )
        return f"{words}; it took {style.duration_text(measured_s)}" if measured_s else words

    def measured_value(self, name: str, result: RunResult) -> float:
        rounds = plots.all_reduce_rounds(result, "pieces")
        assert result.emulated is not None, "launch emulates"
        return 1e3 * float(rounds.median()) / result.emulated.slower

    def refusal_reason(self, **chosen: Any) -> str:
        if refusal := self.too_many_ranks_text(chosen["ranks"]):
            return refusal
        if chosen["size"] > MAX_RUN_BYTES:
            return "1 GiB is theory here: to run it, take 16 MiB or less"
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        # What real ranks do for each message must be little beside the time that it waits.
        total_s = self.predict(**chosen)["all_reduce_ms"] / 1e3
        slower = slow_motion_factor(total_s / max(1, chosen["messages"] / 16))
        hardware = Emulated(
            latency_us=slower * chosen["latency_us"],
            gb_per_s=chosen["gb_per_s"] / slower,
            hardware=f"a ring of {chosen['latency_us']} µs and {chosen['gb_per_s']} GB/s",
            slower=slower,
        )
        how: dict[str, Any] = {"total_bytes": chosen["size"], "pieces": (chosen["messages"],)}
        how |= {"message_bytes": (), "repeats": 1, "emulate": hardware}
        return labkit.run("all_reduce", nproc=chosen["ranks"], **how)


def _ring_network(*, ranks: int, latency_us: float, gb_per_s: float, **_: Any) -> AlphaBeta:
    """Return the costs of a whole all-reduce: of one message, and of a byte handed to the call."""
    steps = theory.ring_step_count("all_reduce", ranks)
    on_the_wire = theory.collective_wire_bytes("all_reduce", 1, ranks)
    return AlphaBeta(steps * latency_us / 1e6, on_the_wire / (gb_per_s * 1e9))
