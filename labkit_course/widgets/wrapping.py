"""Explorer of lab 2: a rank's memory during a step and its traffic, by stage and wrapping."""

from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.plots import memory as plots
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import fsdp as theory
from labkit_course.widgets.explorer import Control, Explorer, Measured, Numbers

# An imagined device: some ways to train the default model fit, others do not.
BUDGET_BYTES = 5_000_000
SEQUENCE_TOKENS = 8
# By label, the number of blocks and their width.
MODELS = {
    "3 blocks of width 64: 83 thousand parameters": (3, 64),
    "3 blocks of width 128: 329 thousand": (3, 128),
    "6 blocks of width 128: 659 thousand": (6, 128),
    "3 blocks of width 256: 1.31 million": (3, 256),
    "6 blocks of width 256: 2.63 million": (6, 256),
}
ZERO_STAGES = {
    "0: nothing (DDP)": 0,
    "1: optimizer": 1,
    "2: all, gathered once": 2,
    "3: all, gathered twice (FSDP)": 3,
}
STAGE_LABELS = ("DDP", "ZeRO 1", "gathered\nonce", "FSDP")
UNITS = {"whole model": "root", "blocks": "block", "layers": "layer"}
PRECISIONS, ELEMENT_BYTES = {"float32": "fp32", "bfloat16": "bf16"}, {"fp32": 4, "bf16": 2}


class WrappingExplorer(Explorer):
    """A stack of MLPs trained with DDP, FSDP, or the ZeRO stages between them."""

    title = "What does a rank hold, and what does it send?"
    controls: ClassVar = {
        "model": Control("model", MODELS, (3, 128)),
        "stage": Control("sharded", ZERO_STAGES, 3),
        "wrap": Control("units", UNITS, "block"),
        "ranks": Control("ranks", (2, 4, 8), 2),
        "batch": Control("sequences of a rank", (8, 32, 128), 32),
        "checkpointing": Control("activations", {"keep": False, "recompute": True}, False),
        "precision": Control("gathered, computed in", PRECISIONS, "fp32"),
    }
    formulas = (theory.step_ledger, theory.stage_collectives, theory.stage_wire_bytes)
    tolerances: ClassVar = {"peak_total_bytes": 0.05}
    size = (8.5, 4.2)

    def predict(self, **chosen: Any) -> dict[str, float]:
        how = {"stage": chosen["stage"], "number_bytes": ELEMENT_BYTES[chosen["precision"]]}
        sent = theory.stage_collectives(_stack_layers(**chosen), chosen["ranks"], **how)
        return {"peak_total_bytes": _step_ledger(**chosen).peak["total"], **sent}

    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        ledger, label = _step_ledger(**chosen), STAGE_LABELS[chosen["stage"]]
        look = {"left": 0.065, "right": 0.99, "top": 0.78, "bottom": 0.12, "wspace": 0.35}
        wide, narrow = figure.subplots(1, 2, width_ratios=(2.6, 1), gridspec_kw=look)
        marks: dict[str, Any] = {"budget": BUDGET_BYTES, "ax": wide}
        plots.memory_over_step(ledger.moments, ledger.backward, result, **marks)
        ranks = chosen["ranks"]
        handed = theory.stage_collectives(_stack_layers(**chosen), ranks, stage=0)
        ddp = theory.stage_wire_bytes(handed, ranks)
        sent, measured = theory.stage_wire_bytes(predicted, ranks), {}
        if result is not None:
            counted = {name: result.value(name) for name in predicted}
            measured = {label: theory.stage_wire_bytes(counted, ranks)}
        bars, what = {"DDP": ddp} | {label: sent}, "sent by a rank in a step"
        plots.byte_bars(bars, measured, style.COLLECTIVE_COLOURS, ylabel=what, ax=narrow)
        peak, total, of_ddp = ledger.peak["total"], sum(sent.values()), sum(ddp.values())
        when = "forward" if ledger.peak_index < ledger.backward else "backward"
        side = "over" if peak > BUDGET_BYTES else "below"
        return (
            f"a rank's peak of {peak / 1e6:.3g} MB lies in the {when} pass, "
            f"{abs(peak - BUDGET_BYTES) / 1e6:.3g} MB {side} the budget; "
            f"it sends {total / 1e6:.3g} MB in a step, {total / of_ddp:.3g} × what DDP sends"
        )

    def refusal_reason(self, **chosen: Any) -> str:
        reason = (
            "no program of labkit trains with ZeRO 1: this is theory alone; take stage 0, 2 or 3"
        )
        return reason if chosen["stage"] == 1 else ""

    def launch(self, **chosen: Any) -> RunResult:
        blocks, dim = chosen["model"]
        how = {name: chosen[name] for name in ("batch", "checkpointing", "precision")}
        # One step is enough: memory and traffic are the same in each.
        how |= {"model": "mlp_stack", "layers": blocks, "dim": dim, "steps": 1}
        # Stage 0 is DDP, which has no units.
        how["wrap"] = chosen["wrap"] if chosen["stage"] else "none"
        how["reshard_after_forward"] = chosen["stage"] != 2
        return labkit.run("fsdp_wrap", nproc=chosen["ranks"], **how)


def _stack_layers(*, model: tuple[int, int], wrap: str, **_: Any) -> list[theory.LinearLayer]:
    blocks, dim = model
    return theory.mlp_stack_layers(wrap, dim, blocks)


def _step_ledger(**chosen: Any) -> theory.MemoryLedger:
    layers, tokens = _stack_layers(**chosen), SEQUENCE_TOKENS * chosen["batch"]
    how = {"number_bytes": ELEMENT_BYTES[chosen["precision"]], "stage": chosen["stage"]}
    how["checkpointing"] = chosen["checkpointing"]
    return theory.step_ledger(layers, tokens, chosen["ranks"], **how)
