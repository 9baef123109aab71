"""Explorer of lab 6b: what a step waits for, and how much of a GPU's speed is left."""

from dataclasses import replace
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import labkit
from labkit.plots import style
from labkit.plots.runs import comparison_row
from labkit.runs.result import RunResult
from labkit.theory.links import LL, LL128, NCCL_PROTOCOLS, SIMPLE, Protocol
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.step_time import COMPUTE_STREAM, collective_s
from labkit_simulate.theory.transformer import LLAMA_2_7B, StepEstimate, TrainingSetup
from launch.given import TRAIN

SEQUENCE, BLOCKS = 2048, 8
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
PROTOCOLS: dict[str, tuple[Protocol, ...]] = {
    "the quickest": NCCL_PROTOCOLS,
    "Simple": (SIMPLE,),
    "LL": (LL,),
    "LL128": (LL128,),
}
BAR_COLOURS = {
    "forward": style.BLUE,
    "backward": style.ORANGE,
    "optimizer": style.PURPLE,
    "all_gather": style.SKY,
    "reduce_scatter": style.GREEN,
    "exposed": style.EXPOSURE_COLOUR,
}


class StepExplorer(Explorer):
    """The first blocks of Llama 2 7B under FSDP on H100s; *run it* simulates the same step."""

    title = "What does a step wait for?"
    controls: ClassVar = {
        "gpus": Control("GPUs", {f"{count:,}": count for count in (8, 64, 256, 1024)}, 1024),
        "tokens": Control("tokens on a GPU", (2048, 4096, 8192), 2048),
        "protocol": Control("NCCL's protocol", PROTOCOLS, NCCL_PROTOCOLS),
        "latency_us": Control("latency between hosts, µs", (14, 78, 434), 78),
        "share": Control(
            "share of each network card",
            {"all": 1.0, "half": 0.5, "a quarter": 0.25, "an eighth": 0.125},
            1.0,
        ),
    }
    formulas = (TrainingSetup.estimate_step, collective_s)
    tolerances: ClassVar = {"reckoned_step_s": 0.05, "reckoned_compute_s": 0.05}
    run_tip = "simulate one rank of so many; nothing is measured"
    size = (8.5, 4.4)

    def predict(self, **chosen: Any) -> dict[str, float]:
        time = estimate(**chosen).time
        return {"reckoned_step_s": time.step_s, "reckoned_compute_s": time.compute_s}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        step = estimate(**chosen)
        above, below = figure.subplots(
            2,
            1,
            gridspec_kw={
                "left": 0.14,
                "right": 0.97,
                "top": 0.88,
                "bottom": 0.12,
                "hspace": 0.75,
                "height_ratios": (1, 1.3),
            },
        )
        draw_step(above, step)
        speeds = {count: estimate(**(chosen | {"gpus": count})).tokens_per_s for count in GPUS}
        kept = {count: speed / speeds[GPUS[0]] for count, speed in speeds.items()}
        draw_kept(below, kept, chosen["gpus"])
        words = (
            f"a step of {style.duration_text(step.time.step_s)} waits for"
            f" {step.time.exposed_s / step.time.step_s:.0%} of it; a GPU of {chosen['gpus']:,}"
            f" keeps {kept[chosen['gpus']]:.0%} of the speed that it has among 8"
        )
        if result is not None:
            simulated = style.duration_text(result.value("reckoned_step_s"))
            words += f"; the simulated step takes {simulated}"
        return words

    def table_row(self, name: str, predicted: float, result: Measured) -> dict[str, str]:
        simulated = result.value(name) if result else None
        return comparison_row(
            {"formula": predicted}, "simulated", simulated, self.tolerances.get(name, 0.0)
        )

    def launch(self, **chosen: Any) -> RunResult:
        return labkit.simulate(
            TRAIN,
            world_size=chosen["gpus"],
            hardware=hosts(**chosen),
            layers=BLOCKS,
            sequence=SEQUENCE,
            batch=chosen["tokens"] // SEQUENCE,
        )


def hosts(*, protocol: Any, latency_us: float, share: float, **_: Any) -> Hardware:
    """Return hosts of eight H100 with the chosen network."""
    return get_hardware("h100-8x").with_network(
        latency_us=latency_us, bandwidth_share=share, protocols=protocol
    )


def estimate(*, gpus: int, tokens: int, **network: Any) -> StepEstimate:
    """Estimate a step of the first blocks, sharded over all GPUs."""
    model = replace(LLAMA_2_7B, layers=BLOCKS)
    setup = TrainingSetup(model, tokens // SEQUENCE, SEQUENCE, gpus, "none", last_regathered=True)
    return setup.estimate_step(hosts(**network))


def draw_step(ax: Axes, step: StepEstimate) -> None:
    """Draw computation above communication, and below both where nothing computes."""
    lanes: list[tuple[float, str, float, float]] = []
    for bar in step.time.bars:
        lane = 0.0 if bar.stream == COMPUTE_STREAM else 1.0
        lanes.append((lane, bar.name.partition(" ")[0], bar.start_s, bar.dur_s))
    lanes += [(1.62, "exposed", bar.start_s, bar.dur_s) for bar in step.time.exposure_bars]
    for lane, kind, start_s, dur_s in lanes:
        height = 0.16 if kind == "exposed" else 0.8
        look: dict[str, Any] = {
            "facecolors": BAR_COLOURS[kind],
            "edgecolor": "white",
            "linewidth": 0.4,
        }
        ax.broken_barh([(1e3 * start_s, 1e3 * dur_s)], (lane - height / 2, height), **look)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(
        xlabel="estimated time of a step, ms", xlim=(0, 1e3 * step.time.step_s), ylim=(1.8, -0.5)
    )
    ax.set_yticks((0, 1), ("compute", "messages"))
    used = {kind for _, kind, _, dur_s in lanes if dur_s}
    colours = {kind: colour for kind, colour in BAR_COLOURS.items() if kind in used}
    style.add_legend_above(ax, len(colours), style.legend_patches(colours), **style.SMALL_LEGEND)


def draw_kept(ax: Axes, kept: dict[int, float], chosen: int) -> None:
    """Draw what is left of a GPU's speed on an axis that begins at 0; the chosen one is marked."""
    ax.plot(list(kept), list(kept.values()), marker="o", **style.PREDICTION_STYLE)
    ax.plot(chosen, kept[chosen], "o", color=style.EXPOSURE_COLOUR, ms=9)
    ax.annotate(f"{kept[chosen]:.0%}", (chosen, kept[chosen]), (0, -16), **LABEL)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xscale="log", ylim=(0, 1.15), xlabel="GPUs", ylabel="speed of a GPU")
    ax.set_xticks(list(kept), [f"{count:,}" for count in kept])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


LABEL: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
