"""Train a model that FSDP shards, and choose what it wraps.

    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap                                  # small, any machine
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap --model hf_bert --check parity   # equal to one device?
    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_wrap --preset paper                   # four GPUs

What is wrapped together is gathered together, just before it computes: one unit holds all parameters at once, many
small units send many small messages.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from labkit import parity, rank, requirements
from labkit.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from labkit.models import catalog
from labkit.models.delay import delay_compute
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import apply_activation_checkpointing, blocks_of, freeze_blocks
from labkit.parallel.compiling import apply_compile, graphs_compiled
from labkit.parallel.fsdp import apply_fsdp
from labkit.parallel.units import Units
from labkit.parity.fsdp import compare_training

FSDP = ("wrap", "fsdp", "blocks", "skip", "precision", "offload", "reshard_after_forward", "prefetch")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Config:
    """Which model, how it is wrapped, and what is measured."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine, paper is the toy model of the benchmark it comes from, for GPUs."""
    model: Literal["toy", "hf_bert", "hf_t5", "transformer", "nested", "moe", "mlp_stack"] = "toy"
    """What is trained; hf_bert and hf_t5 need transformers."""
    wrap: Literal["none", "root", "block", "layer", "yours"] = "block"
    """Units: none (every rank holds all), the whole model, each block of the model, each layer with parameters; yours
    are those that is_unit of use= chooses."""
    blocks: tuple[str, ...] = ()
    """Class names of the blocks, instead of the model's own."""
    skip: tuple[NonNegativeInt, ...] = ()
    """Blocks that are left out of the wrapping by mistake, counted from 0: to see what that looks like."""
    freeze: tuple[NonNegativeInt, ...] = ()
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
    delay_ms: NonNegativeFloat = 0.0
    """Make each block's forward and backward pass last longer by this."""
    hidden: PositiveInt | None = None
    """Width of the toy model's wide layers."""
    narrow: PositiveInt | None = None
    """Width of the toy model's narrow layers."""
    dim: PositiveInt | None = None
    """Width of mlp_stack."""
    batch: PositiveInt | None = None
    """Samples of a rank in a step, where the model can choose."""
    steps: PositiveInt = 5
    """Timed steps, after one to warm up; with a check, compared steps."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"hidden": 10000, "narrow": 1000, "steps": 20}}

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        catalog.check(self.model, self.blocks, self.sizes(), skip=self.skip, freeze=self.freeze)
        if self.wrap == "none" and (self.precision != "fp32" or self.offload):
            raise ValueError("wrap none has no unit that could gather in bf16 or be offloaded: use wrap root or block")
        if self.skip and self.wrap != "block":
            raise ValueError(f"skip {self.skip} leaves out blocks, but wrap is {self.wrap!r}: use wrap block")
        if self.compile:
            requirements.refuse_without_compiler()
        if self.compile and self.checkpointing and self.delay_ms:
            raise ValueError("a checkpointed block that sleeps does not compile: leave out delay_ms or checkpointing")

    def sizes(self) -> dict[str, int]:
        """Those that were asked for; the model knows the rest."""
        sizes = {"hidden": self.hidden, "narrow": self.narrow, "dim": self.dim, "batch": self.batch}
        return {name: size for name, size in sizes.items() if size is not None}


@rank.replaceable
def is_unit(module: nn.Module) -> bool:
    """Whether FSDP gathers this module's parameters together, as a unit; asked of every module but the root."""
    return type(module).__name__ == "Linear"


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        run(config, here)


def run(config: Config, here: rank.Here) -> None:
    """The same within a session."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of a unit, which nobody changes in place
    lab = build(config, here.device, here.rank)
    for block in blocks_of(lab, config.blocks or lab.block_types):
        delay_compute(block, config.delay_ms)
    model, units = apply(config, here.mesh(data=here.world_size, alone=1), lab)
    if config.check == "none":
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        train(config, here, lab, model, optimizer, partial(here.steps, units=units if config.timeline else None))
        return
    dtype = PRECISIONS[config.precision]
    steps = config.steps if dtype == torch.float32 else min(config.steps, 1)  # from the second on rounding decides
    losses = train(config, here, lab, model, parity.optimizer_of(model), partial(here.plain_steps, most=steps))
    one_device = parity.OneDevice(partial(build, config, here.device), here.world_size, dtype, here.device)
    verdict = compare_training(one_device, model, losses, rank=here.rank, steps=steps)
    if config.compile:
        verdict |= {"compiled_graphs": graphs_compiled(), "ok": verdict["ok"] and graphs_compiled() > 0}
    here.verdict(**verdict)


def build(config: Config, device: torch.device, index: int) -> LabModel:
    """The model as rank ``index`` starts with it; only experts differ from rank to rank."""
    lab = catalog.build(config.model, seed=0, expert_seed=index, **config.sizes()).to(device)
    freeze_blocks(lab, config.blocks or lab.block_types, config.freeze)
    return lab


def apply(config: Config, mesh: DeviceMesh, lab: LabModel) -> tuple[nn.Module, Units]:
    """The model on the mesh, and its units."""
    blocks = config.blocks or lab.block_types
    if config.checkpointing:
        apply_activation_checkpointing(lab, blocks)
    if config.compile:
        apply_compile(lab, blocks)
    return apply_fsdp(lab, mesh, is_unit=is_unit, **{name: getattr(config, name) for name in FSDP})


def train(
    config: Config, here: rank.Here, lab: LabModel, model: nn.Module, optimizer: Optimizer, measure: rank.Measure
) -> list[Tensor]:
    """Forward, backward and update in every measured step; this rank's losses."""
    losses: list[Tensor] = []
    scaler = ShardedGradScaler(here.device.type, enabled=config.scaler)
    tracked = [model, optimizer] if config.fsdp == 2 or config.wrap == "none" else []  # FSDP1's views elude a tracker
    for index, step in enumerate(measure(config.steps, track=tracked)):
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
