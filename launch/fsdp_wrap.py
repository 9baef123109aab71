"""Train a model that FSDP shards, and choose what it wraps.

    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap                                  # small, any machine
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap --model hf_bert --check parity   # equal to one device?
    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_wrap --preset paper                   # four GPUs

What is wrapped together is gathered together, just before it computes: one unit holds all parameters at once, many
small units send many small messages.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from labkit import compiler, parity, rank
from labkit.models import catalog
from labkit.models.delay import delay_compute
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import blocks_of, freeze_blocks
from labkit.parallel.fsdp import apply_fsdp
from labkit.parallel.units import Units

HOW = ("wrap", "fsdp", "blocks", "skip", "checkpointing", "precision", "offload", "reshard_after_forward",
       "prefetch")  # fmt: skip
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Config:
    """Which model, how it is wrapped, and what is measured."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine, paper is the toy model of the benchmark it comes from, for GPUs."""
    model: Literal["toy", "hf_bert", "hf_t5", "transformer", "nested", "moe", "mlp_stack"] = "toy"
    """What is trained; hf_bert and hf_t5 need transformers."""
    wrap: Literal["none", "root", "block", "layer"] = "block"
    """Units: none (every rank holds all), the whole model, each block of the model, or each layer with parameters."""
    blocks: tuple[str, ...] = ()
    """Class names of the blocks, instead of the model's own."""
    skip: tuple[int, ...] = ()
    """Blocks that are left out of the wrapping by mistake, counted from 0: to see what that looks like."""
    freeze: tuple[int, ...] = ()
    """Blocks whose parameters are not trained, counted from 0."""
    fsdp: Literal[1, 2] = 2
    """FullyShardedDataParallel (1) or fully_shard (2)."""
    reshard_after_forward: bool = True
    """Free a unit's full parameters after its forward pass, and gather them again in the backward pass."""
    prefetch: bool = False
    """Gather a unit while the one before it computes, on gloo as well (FSDP2 on NCCL does so anyway)."""
    checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: parameters are gathered and used in bfloat16, gradients are reduced in float32."""
    offload: bool = False
    """Keep the shards in host memory."""
    scaler: bool = False
    """Scale the loss, and skip a step whose gradients are not finite on any rank."""
    compile: bool = False
    """Compile each block with inductor."""
    delay_ms: float = 0.0
    """Make each block's forward and backward pass last longer by this."""
    hidden: int | None = None
    """Width of the toy model's wide layers."""
    narrow: int | None = None
    """Width of the toy model's narrow layers."""
    dim: int | None = None
    """Width of mlp_stack."""
    batch: int | None = None
    """Samples of a rank in a step, where the model can choose."""
    steps: int = 5
    """Timed steps, after one to warm up; with a check, compared steps."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"hidden": 10000, "narrow": 1000, "steps": 20}}

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        catalog.check(self.model, self.blocks, self.sizes())
        if self.wrap == "none" and (self.precision != "fp32" or self.offload):
            raise ValueError("wrap none has no unit that could gather in bf16 or be offloaded: use wrap root or block")
        if self.skip and self.wrap != "block":
            raise ValueError(f"skip {self.skip} leaves out blocks, but wrap is {self.wrap!r}: use wrap block")
        if self.compile:
            compiler.refuse_if_missing()

    def sizes(self) -> dict[str, int]:
        """Those that were asked for; the model knows the rest."""
        sizes = {"hidden": self.hidden, "narrow": self.narrow, "dim": self.dim, "batch": self.batch}
        return {name: size for name, size in sizes.items() if size is not None}


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        run(config, here)


def run(config: Config, here: rank.Here) -> None:
    """The same within a session."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of a unit, which nobody changes in place

    def build(index: int) -> LabModel:  # as rank ``index`` starts with it; only experts differ from rank to rank
        lab = catalog.build(config.model, seed=0, expert_seed=index, **config.sizes()).to(here.device)
        freeze_blocks(lab, config.blocks or lab.block_types, config.freeze)
        return lab

    lab, mesh = build(here.rank), here.mesh(data=here.world_size, alone=1)
    for block in blocks_of(lab, config.blocks or lab.block_types):
        delay_compute(block, config.delay_ms)
        block.forward = torch.compile(block.forward, disable=not config.compile)
    model, units = apply_fsdp(lab, mesh, **{name: getattr(config, name) for name in HOW})
    if config.check == "none":
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        train(config, here, here.steps, model, lab, optimizer, units if config.timeline else {})
    else:
        one_device = parity.OneDevice(build, here.world_size, PRECISIONS[config.precision], here.device)
        measure = partial(here.plain_steps, most=1 if config.precision == "bf16" else None)  # then rounding decides
        losses = train(config, here, measure, model, lab, parity.optimizer_of(model), {})
        here.verdict(**one_device.verdict(here.rank, losses, model))


def train(config: Config, here: rank.Here, measure: rank.Measure, model: nn.Module, lab: LabModel, optimizer: Any,
          units: Units) -> list[Tensor]:  # fmt: skip
    """Forward, backward and update in every measured step; this rank's losses."""
    losses: list[Tensor] = []
    scaler = ShardedGradScaler(here.device.type, enabled=config.scaler)
    tracked = [model, optimizer] if config.fsdp == 2 or config.wrap == "none" else []  # FSDP1's views elude a tracker
    for index, step in enumerate(measure(config.steps, track=tracked, units=units)):
        inputs = parity.samples_and_seed(lab, here.device, index, here.rank)
        optimizer.zero_grad()
        with step.span("forward"):
            losses.append(lab.get_loss(inputs, model(*inputs)))
        with step.span("backward"):
            lab.run_backward(scaler.scale(losses[-1]))
        with step.span("optimizer"):
            scaler.step(optimizer)
            scaler.update()
        step.scalar("loss", losses[-1])
    return losses


if __name__ == "__main__":
    rank.start(main, Config)
