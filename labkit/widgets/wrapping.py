"""What a rank of lab 2 holds and sends: parameters, units, resharding, checkpointing, against a budget."""

from collections.abc import Mapping
from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit import plots
from labkit.result import RunResult
from labkit.theory import fsdp as theory
from labkit.widgets.explorer import Control, Explorer


class Wrapping(Explorer):
    """A stack of MLPs under FSDP, or under DDP where nothing is wrapped."""

    title = "What does a rank hold, and what does it send?"
    controls: ClassVar = {
        "ranks": Control("ranks", (2, 4), 2),
        "dim": Control("width", (64, 128, 256, 512), 128),
        "wrap": Control("units", {"whole model": "root", "blocks": "block", "layers": "layer"}, "block"),
        "batch": Control("sequences", (8, 32, 128), 32),
        "reshard": Control("after the forward pass", {"free": True, "keep": False}, True),
        "checkpointing": Control("activations", {"keep": False, "recompute": True}, False),
    }
    formulas = (theory.step_peak, theory.collectives)
    tolerances: ClassVar = {"peak_total_bytes": 0.05}

    def _peak(self, ranks: int, dim: int, wrap: str, batch: int, reshard: bool, checkpointing: bool) -> dict[str, int]:
        layers = theory.mlp_stack_layers(wrap, dim)
        how = {"reshard_after_forward": reshard, "checkpointing": checkpointing}
        return theory.step_peak(layers, 8 * batch, ranks, **how)

    def predict(self, **chosen: Any) -> dict[str, float]:
        layers = theory.mlp_stack_layers(chosen["wrap"], chosen["dim"])
        sent = theory.collectives(layers, chosen["ranks"], reshard_after_forward=chosen["reshard"])
        return {"peak_total_bytes": self._peak(**chosen)["total"], **sent}

    def draw(self, figure: Figure, predicted: Mapping[str, float], result: RunResult | None, **chosen: Any) -> str:
        peak = self._peak(**chosen)
        parts = {name: size for name, size in peak.items() if name != "total"}
        plots.breakdown({"a rank": parts}, {"a rank": result} if result else None, ax=figure.subplots())
        return f"at the peak a rank holds {peak['total'] / 1e6:.3g} MB"

    def launch(self, **chosen: Any) -> RunResult:
        how = {"reshard_after_forward": chosen["reshard"], "checkpointing": chosen["checkpointing"]}
        return labkit.run(
            "fsdp_wrap",
            nproc=chosen["ranks"],
            model="mlp_stack",
            steps=2,
            **{name: chosen[name] for name in ("dim", "wrap", "batch")},
            **how,
        )
