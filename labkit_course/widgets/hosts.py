"""Explorer of lab 8: what leaves a host under FSDP and HSDP, and whether it hides."""

from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import fsdp as fsdp_theory
from labkit_cluster import theory
from labkit_cluster.local_hosts import start_local_hosts
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

WAYS = {"fsdp": "FSDP", "hsdp": "HSDP"}
NAME, DIM = "leaving_times", 64
COLOURS = {"computing": style.BLUE, "waiting for the cards": style.EXPOSURE_COLOUR}


class HostsExplorer(Explorer):
    """8 billion parameters on several hosts; a run counts what leaves a host of this machine."""

    title = "Does it pay to keep bytes inside a host?"
    controls: ClassVar = {
        "hosts": Control("hosts", (2, 8, 128), 2),
        "gpus": Control("GPUs of a host", (2, 4, 8), 8),
        "cards": Control("cards of a host, 50 GB/s each", (1, 2, 8), 1, only_drawn=True),
        "tokens": Control("tokens on a GPU", (1024, 4096, 16384), 4096, only_drawn=True),
        "way": Control("the run shards by", {text: way for way, text in WAYS.items()}, "hsdp"),
    }
    formulas = (theory.host_egress_bytes, theory.pass_ms, theory.step_ms)
    run_tip = "count on real ranks of two hosts, made on this machine, what leaves one of them"
    size = (8.5, 2.9)

    def predict(self, **chosen: Any) -> dict[str, float]:
        is_hybrid = chosen["way"] == "hsdp"
        times = theory.host_egress_bytes(1, chosen["hosts"], chosen["gpus"], hybrid=is_hybrid)
        return {NAME: times}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        how = {name: chosen[name] for name in ("hosts", "gpus", "cards", "tokens")}
        passes, steps = theory.pass_ms(**how), theory.step_ms(**how)
        computing = sum(passes["computing"])
        rows = {
            text: dict(zip(COLOURS, (computing, steps[way] - computing), strict=True))
            for way, text in WAYS.items()
        }
        axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.97, "top": 0.83, "bottom": 0.2})
        texts = [f"{steps[way]:.0f} ms" for way in WAYS]
        style.draw_rows(axes, rows, COLOURS, texts)
        axes.set_xlim(0, 1.15 * max(steps.values()))
        axes.set_xlabel("milliseconds of a step, if all bytes hide that can")
        style.add_legend_above(axes, 2, style.legend_patches(COLOURS))
        busy = {way: sum(passes[way]) for way in WAYS}
        words = (
            f"computing takes {computing:.0f} ms; the cards of a host are busy for "
            f"{busy['fsdp']:.0f} ms under FSDP and {busy['hsdp']:.0f} ms under HSDP; a step takes "
            f"{steps['fsdp'] / steps['hsdp']:.2g} times as long under FSDP"
        )
        if result is not None:
            counted = self.measured_value(NAME, result)
            words += (
                f"; a run with {WAYS[chosen['way']]} sent {counted:g} times the network's bytes"
            )
        return words

    def measured_value(self, name: str, result: RunResult) -> float:
        kinds = ("all_gather", "reduce_scatter")
        sent = sum(result.value(f"{kind}_wire_bytes") for kind in kinds)
        if result.params.get("hybrid"):
            sent = result.world_size // 2 * result.value("all_reduce_wire_bytes")
        layers = fsdp_theory.mlp_stack_layers("block", DIM)
        units = fsdp_theory.unit_bytes(layers, 1).values()
        return float(sent / sum(whole for _, whole in units))

    def refusal_reason(self, **chosen: Any) -> str:
        if chosen["hosts"] > 2 or chosen["gpus"] > 4:
            return "this is theory here: to run it, take 2 hosts with 2 or 4 GPUs each"
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        how: dict[str, Any] = {"model": "mlp_stack", "dim": DIM, "steps": 1, "device": "cpu"}
        how["nproc"] = chosen["gpus"]
        with start_local_hosts(2) as hosts:
            if chosen["way"] == "hsdp":
                return labkit.run("fsdp_matrix", hosts=hosts, hybrid=chosen["gpus"], **how)
            return labkit.run("fsdp_wrap", hosts=hosts, **how)
