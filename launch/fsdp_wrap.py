"""Train a model that FSDP shards, and choose what it wraps.

    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap                      # any machine
    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_wrap --preset paper       # four GPUs
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap --model hf_bert --check parity

FSDP gathers a unit's parameters just before the unit computes. One unit for the whole model holds
all parameters at once; many small units send many small messages. ``fsdp_matrix`` has the other
options of FSDP: hybrid sharding, offload, float16, saving and loading, and more.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit import parity, rank
from labkit.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from labkit.models import catalog
from labkit.models.delay import delay_compute
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks
from labkit.parallel.fsdp import (
    GATHER_DTYPES,
    apply_fsdp,
    prefetch_in_order,
    random_block_index,
)
from labkit.parallel.small_fsdp import FlatShards, shard_unit
from labkit.parallel.units import Units, choose_block_types, fsdp_units
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training, forward_backward

# Options that a learner's own FSDP does not have, nor units that a learner makes.
NOT_WITH_YOURS = (
    *("forget", "reshard_after_forward", "prefetch"),
    *("checkpointing", "precision", "timeline"),
)


@dataclass
class Config:
    """Which model, how it is wrapped, and what is measured."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine; paper, for GPUs, has the sizes that small imitates."""
    model: catalog.ModelName = "toy"
    """The model to train; hf_bert and hf_t5 need transformers."""
    wrap: Literal["none", "root", "block", "layer", "limit", "yours"] = "block"
    """Units: none (every rank holds all), the whole model, each block of the model, each layer that
    owns parameters, blocks in a row up to a limit, or those that is_unit of use= chooses (yours).
    """
    limit: PositiveInt | None = None
    """Bytes of parameters that a unit gathers at most, for wrap limit; make_units of use= may make
    the units.
    """
    fsdp: Literal[1, 2, "yours"] = 2
    """FullyShardedDataParallel (1) or fully_shard (2); yours is small_fsdp of use=."""
    forget: NonNegativeInt | None = None
    """Leave out one block of the model, drawn with this seed: a riddle."""
    reshard_after_forward: bool = True
    """Free a unit's parameters after its forward pass, and gather them again for the backward."""
    prefetch: bool = False
    """Gather a unit while the one before it computes, on gloo as well (NCCL does so anyway); which
    one that is, prefetch of use= may choose.
    """
    checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: parameters are gathered and used in it, gradients are reduced in float32."""
    delay_ms: NonNegativeFloat = 0.0
    """Make each block's forward and backward pass longer by this many milliseconds."""
    hidden: PositiveInt | None = None
    """Width of the toy model's wide layers, or of hf_bert and hf_t5."""
    narrow: PositiveInt | None = None
    """Width of the toy model's narrow layers."""
    dim: PositiveInt | None = None
    """Width of mlp_stack, double_linear, unused_linear and skip."""
    layers: PositiveInt | None = None
    """Layers of hf_bert and hf_t5, blocks of mlp_stack."""
    batch: PositiveInt | None = None
    """Samples per rank and step, if the model lets you choose."""
    steps: PositiveInt = 5
    """Timed steps, after one to warm up; with a check, compared steps."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"steps": 20}}
    SIZES: ClassVar[tuple[str, ...]] = ("hidden", "narrow", "dim", "layers", "batch")

    def validate(self, world_size: int) -> None:
        catalog.check_model(self.model, sizes=self.model_sizes())
        for message in self.conflicts(world_size):
            raise ValueError(message)

    def conflicts(self, world_size: int) -> Iterator[str]:
        """Yield a message for each choice of options that cannot work."""
        others = [name for name in NOT_WITH_YOURS if getattr(self, name) != getattr(Config, name)]
        others += ["model moe"] if self.model == "moe" else []
        others += ["wrap none"] if self.wrap == "none" else []
        if self.fsdp == "yours" and others:
            yield (
                f"{' and '.join(others)} is not for fsdp yours, which shards units of shared"
                " parameters, trained in float32: use fsdp 2, or leave it out"
            )
        if (self.wrap == "limit") != (self.limit is not None):
            told = f"wrap is {self.wrap!r}, and limit is {self.limit}"
            yield f"{told}: wrap limit needs a limit, and no other has one"
        if self.wrap == "limit" and (self.fsdp != 2 or others):
            told = " and ".join([*others, f"fsdp {self.fsdp}"])
            yield f"wrap limit trains with fsdp 2 and no other options, not {told}: leave them out"
        if self.wrap == "none" and self.precision in ("bf16", "fp16"):
            yield f"wrap none has no unit that could gather in {self.precision}: use wrap block"
        if self.forget is not None and self.wrap != "block":
            told = f"forget {self.forget} leaves out blocks, but wrap is {self.wrap!r}"
            yield f"{told}: use wrap block"

    def model_sizes(self) -> dict[str, int]:
        """Return the sizes that were asked for; the model knows the others."""
        paper = catalog.MODELS[self.model].paper if self.preset == "paper" else {}
        asked = {name: getattr(self, name) for name in self.SIZES}
        return {**paper, **{name: size for name, size in asked.items() if size is not None}}


@rank.replaceable
def is_unit(module: nn.Module) -> bool:
    """Say whether FSDP gathers this module's parameters together; asked of all but the root."""
    return type(module).__name__ == "Linear"


@rank.replaceable
def make_units(blocks: Sequence[nn.Module], mesh: DeviceMesh, limit: int) -> None:
    """Make the fewest units of consecutive blocks that gather at most ``limit`` bytes each."""
    unit: list[nn.Module] = []
    for block in blocks:
        if unit and sum(p.nbytes for each in [*unit, block] for p in each.parameters()) > limit:
            fully_shard(unit, mesh=mesh)
            unit = []
        unit.append(block)
    fully_shard(unit, mesh=mesh)


@rank.replaceable
def small_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit's parameters in place; return this rank's flat share of them, to train."""
    return shard_unit(unit)


@rank.replaceable
def prefetch(blocks: Sequence[nn.Module]) -> None:
    """Let each unit start the gather of the one that computes after it; called before training."""
    prefetch_in_order(blocks)


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        silence_warnings()
        lab = build_model(config, here.device, here.rank)
        # Before wrapping, so that a delay lies between a unit's gather and its release.
        blocks = find_blocks(lab, lab.block_types)
        for block in blocks:
            delay_compute(block, config.delay_ms)
        here.emulate_units(blocks)
        # Experts, which differ from rank to rank, are units on the axis of one rank.
        mesh = here.mesh(data=here.world_size, alone=1)
        model, units = parallelize_model(config, mesh, lab)
        if config.check == "none":
            measure = partial(here.steps, units=units if config.timeline else None)
            train(config, here, lab, model, make_adam(model), measure)
        else:
            here.finish_check(**check_parity(config, here, lab, model))


def silence_warnings() -> None:
    """Silence warnings about torch's internals, which a reader cannot act on."""
    # A unit is not changed in place; 2.13 has other names; a memory tracker sees p.grad = None.
    returned, renamed = ".*returned a view tensor", ".*(into_tensor|scatter_tensor)` is deprecated"
    for message in (returned, renamed, "Expected a tensor or a traceable wrapper"):
        warnings.filterwarnings("ignore", message=message)


def build_model(config: Config, device: torch.device, index: int) -> LabModel:
    """Build the model as rank ``index`` starts with it; only experts differ from rank to rank."""
    sizes = config.model_sizes()
    return catalog.create_model(config.model, seed=0, expert_seed=index, **sizes).to(device)


def parallelize_model(config: Config, mesh: DeviceMesh, lab: LabModel) -> tuple[nn.Module, Units]:
    """Apply checkpointing and FSDP, in this order; return the model to call, and its units."""
    # First, so that FSDP's hooks lie outside: a block's recomputation uses the parameters that its
    # unit has gathered for the backward pass.
    if config.checkpointing:
        apply_activation_checkpointing(lab, lab.block_types)
    # A learner's FSDP takes the place of PyTorch's: it is called with one unit after another.
    if config.fsdp == "yours":
        block_types = choose_block_types(lab, config.wrap, is_unit=is_unit)
        units = fsdp_units(lab, block_types) or {"": [lab]}
        shards = FlatShards(lab, {name: modules[0] for name, modules in units.items()}, small_fsdp)
        return shards, units
    if config.wrap == "limit":
        assert config.limit, "validate asks for it"
        make_units(find_blocks(lab, lab.block_types), mesh["data"], config.limit)
        fully_shard(lab, mesh=mesh["data"])
        return lab, {}
    # Last, because what FSDP shards must not be replaced or rounded any more.
    skip = forgotten_blocks(config, lab, lab.block_types)
    names = ("wrap", "fsdp", "precision", "reshard_after_forward")
    chosen: Any = {name: getattr(config, name) for name in names}
    chosen["prefetch"] = config.prefetch and prefetch
    return apply_fsdp(lab, mesh, skip=skip, is_unit=is_unit, **chosen)


def forgotten_blocks(config: Config, lab: LabModel, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return the block that ``forget`` draws: no unit, so its parameters stay with the root's."""
    if config.forget is None:
        return ()
    return (random_block_index(config.forget, len(find_blocks(lab, blocks))),)


def make_adam(model: nn.Module) -> Optimizer:
    """Make Adam with one kernel for all shards and one for the rest: it takes no mixture."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.Adam([{"params": each} for each in groups.values()], lr=1e-3, fused=True)


def train(
    config: Config,
    here: rank.Session,
    lab: LabModel,
    model: nn.Module,
    optimizer: Optimizer,
    measure: rank.StepLoop,
) -> list[StepOutcome]:
    """Run forward pass, backward pass and update in every step that ``measure`` gives."""
    outcomes: list[StepOutcome] = []
    tracked = trackable(config, model, optimizer)
    for index, step in enumerate(measure(config.steps, track=tracked)):
        with step.untimed():
            inputs = parity.draw_samples(lab, here.device, index, here.rank)
        optimizer.zero_grad()
        # Only a check keeps outputs: they would count as memory of training.
        outcome = forward_backward(step, lab, model, inputs, keep=config.check == "parity")
        with step.span("optimizer"):
            optimizer.step()
        step.record_scalar("loss", outcome.loss)
        outcomes.append(outcome)
    return outcomes


def trackable(config: Config, model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return what a memory tracker can follow: not FSDP1, whose parameters are views."""
    return [] if config.fsdp == 1 and config.wrap != "none" else [model, optimizer]


def steps_to_compare(steps: int, dtype: torch.dtype) -> int:
    """Return how many of a check's steps are compared: in a short type the first one only."""
    # Later steps start from weights that rounding has moved apart. Where that switches a ReLU, a
    # gradient differs by more than any rounding: by 34 % in hf_t5 after three steps in bfloat16.
    return steps if dtype == torch.float32 else 1


def check_parity(
    config: Config, here: rank.Session, lab: LabModel, model: nn.Module
) -> dict[str, Any]:
    """Train, and return the verdict on every step beside one device's. A collective."""
    dtype = GATHER_DTYPES.get(config.precision, torch.float32)
    steps = steps_to_compare(config.steps, dtype)
    measure = partial(here.plain_steps, most=steps)
    trained = train(config, here, lab, model, parity.make_sgd(model), measure)
    build = partial(build_model, config, here.device)
    one_device = parity.OneDevice(build, here.world_size, dtype)
    whole = model.unshard_model() if isinstance(model, FlatShards) else model
    return compare_fsdp_training(one_device, whole, trained, rank=here.rank, steps=steps)


if __name__ == "__main__":
    rank.run_main(main, Config)
