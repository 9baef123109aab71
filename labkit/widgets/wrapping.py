"""What a rank of lab 2 holds in the course of a step, and what it sends: stage, units, checkpointing, precision."""

from collections.abc import Mapping
from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.plots import fsdp as plots
from labkit.runs.result import RunResult
from labkit.theory import fsdp as theory
from labkit.widgets.explorer import Control, Explorer

BUDGET_BYTES = 5_000_000
"""Bytes of an imagined device: more than some ways to train the default model need, and less than others."""
SEQUENCE_TOKENS = 8  # of a sequence of the model
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
STAGE_LABELS = {0: "DDP", 1: "ZeRO 1", 2: "gathered\nonce", 3: "FSDP"}


class WrappingExplorer(Explorer):
    """A stack of MLPs, trained by DDP, FSDP, or what lies between them."""

    title = "What does a rank hold, and what does it send?"
    controls: ClassVar = {
        "model": Control("model", MODELS, (3, 128)),
        "stage": Control("sharded", ZERO_STAGES, 3),
        "wrap": Control(
            "units", {"whole model": "root", "blocks": "block", "layers": "layer"}, "block"
        ),
        "ranks": Control("ranks", (2, 4, 8), 2),
        "batch": Control("sequences of a rank", (8, 32, 128), 32),
        "checkpointing": Control("activations", {"keep": False, "recompute": True}, False),
        "precision": Control(
            "gathered, computed in", {"float32": "fp32", "bfloat16": "bf16"}, "fp32"
        ),
    }
    formulas = (theory.step_ledger, theory.stage_collectives, theory.stage_wire_bytes)
    tolerances: ClassVar = {"peak_total_bytes": 0.05}
    size = (8.5, 4.2)

    def _step_ledger(
        self,
        *,
        model: tuple[int, int],
        stage: int,
        wrap: str,
        ranks: int,
        batch: int,
        checkpointing: bool,
        precision: str,
    ) -> theory.MemoryLedger:
        return theory.step_ledger(
            _stack_layers(model, wrap),
            SEQUENCE_TOKENS * batch,
            ranks,
            stage=stage,
            checkpointing=checkpointing,
            number_bytes=_element_bytes(precision),
        )

    def predict(self, **chosen: Any) -> dict[str, float]:
        layers, width = (
            _stack_layers(chosen["model"], chosen["wrap"]),
            _element_bytes(chosen["precision"]),
        )
        sent = theory.stage_collectives(
            layers, chosen["ranks"], stage=chosen["stage"], number_bytes=width
        )
        return {"peak_total_bytes": self._step_ledger(**chosen).peak["total"], **sent}

    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        ledger, ranks, stage = self._step_ledger(**chosen), chosen["ranks"], chosen["stage"]
        look = {"left": 0.065, "right": 0.99, "top": 0.78, "bottom": 0.12, "wspace": 0.35}
        wide, narrow = figure.subplots(1, 2, width_ratios=(2.6, 1), gridspec_kw=look)
        plots.memory_over_step(
            ledger.moments, ledger.backward, result, budget=BUDGET_BYTES, ax=wide
        )
        ddp = theory.stage_collectives(
            _stack_layers(chosen["model"], chosen["wrap"]), ranks, stage=0
        )
        sent = {STAGE_LABELS[stage]: theory.stage_wire_bytes(predicted, ranks)}
        measured = {}
        if result is not None:
            handed = {name: result.value(name) for name in predicted}
            measured = {STAGE_LABELS[stage]: theory.stage_wire_bytes(handed, ranks)}
        plots.traffic_by_collective(
            {"DDP": theory.stage_wire_bytes(ddp, ranks)} | sent, measured, ax=narrow
        )
        return _alt_text(
            ledger,
            sum(sent[STAGE_LABELS[stage]].values()),
            sum(theory.stage_wire_bytes(ddp, ranks).values()),
        )

    def refusal_reason(self, **chosen: Any) -> str:
        if chosen["stage"] == 1:
            return "no program of labkit trains with ZeRO 1: this is theory alone; take stage 0, 2 or 3"
        return ""

    def launch(self, **chosen: Any) -> RunResult:
        blocks, dim = chosen["model"]
        return labkit.run(
            "fsdp_wrap",
            nproc=chosen["ranks"],
            model="mlp_stack",
            layers=blocks,
            dim=dim,
            wrap=chosen["wrap"] if chosen["stage"] else "none",
            reshard_after_forward=chosen["stage"] != 2,
            steps=1,
            **{name: chosen[name] for name in ("batch", "checkpointing", "precision")},
        )


def _stack_layers(model: tuple[int, int], wrap: str) -> list[theory.LinearLayer]:
    blocks, dim = model
    return theory.mlp_stack_layers(wrap, dim, blocks)


def _element_bytes(precision: str) -> int:
    return {"fp32": 4, "bf16": 2}[precision]


def _alt_text(ledger: theory.MemoryLedger, sent: float, by_ddp: float) -> str:
    peak = ledger.peak["total"]
    when = "forward" if ledger.peak_index < ledger.backward else "backward"
    side = "over" if peak > BUDGET_BYTES else "below"
    return (
        f"a rank's peak of {peak / 1e6:.3g} MB lies in the {when} pass, {abs(peak - BUDGET_BYTES) / 1e6:.3g} MB {side} "
        f"the budget; it sends {sent / 1e6:.3g} MB in a step, {sent / by_ddp:.3g} × what DDP sends"
    )
