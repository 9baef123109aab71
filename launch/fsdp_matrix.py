"""Train with every option of FSDP: the matrix that is compared with one device.

    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_matrix --hybrid 2 --check parity
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_matrix --precision pure_fp16 --scaler
    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_matrix --save half_way
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_matrix --load half_way --accumulate 2

``fsdp_wrap`` is the same training with only the options that a learner needs first, and ``use=``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from labkit import parity, rank, requirements
from labkit.config import NonNegativeInt, PositiveFloat, PositiveInt
from labkit.models import catalog
from labkit.models.delay import delay_compute
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks
from labkit.parallel.compiling import apply_compile, count_compiled_graphs
from labkit.parallel.fsdp import apply_fsdp, sharding_mesh
from labkit.parallel.saving import CheckpointFolder, load_problem, load_training, save_training
from labkit.parallel.units import Units
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training, forward_backward
from labkit.parity.one_device import Rounding, cast_floats, require_gradients
from labkit.session.meter import Step
from launch import fsdp_wrap
from launch.fsdp_wrap import Config as WrapConfig

Wrap = Literal["none", "root", "block", "layer", "every", "size"]
Precision = Literal["fp32", "bf16", "fp16", "pure_fp16", "autocast"]
APPLY_FSDP_OPTIONS = (
    *("wrap", "fsdp", "blocks", "precision", "offload", "reshard_after_forward"),
    *("prefetch", "ignore", "min_numbers"),
)
FSDP1_OPTIONS = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
# For each precision, one device's dtype in a comparison, and what it rounds to it.
PRECISION_DTYPES: dict[Precision, tuple[torch.dtype, Rounding]] = {
    "fp32": (torch.float32, "parameters"),
    "bf16": (torch.bfloat16, "parameters"),
    "fp16": (torch.float16, "parameters"),
    "pure_fp16": (torch.float16, "everything"),
    "autocast": (torch.bfloat16, "autocast"),
}


@dataclass
class Config(WrapConfig):
    """Which model, which of FSDP's options, and what is measured."""

    wrap: Wrap = "block"  # type: ignore[assignment]  # others than fsdp_wrap's
    """Units: none (every rank holds all), the whole model, each block, each layer that owns
    parameters, every module that contains any, or those with min_numbers of them (size).
    """
    fsdp: Literal[1, 2] = 2
    """FullyShardedDataParallel (1) or fully_shard (2)."""
    precision: Precision = "fp32"  # type: ignore[assignment]  # more than fsdp_wrap's
    """bf16, fp16: gather and compute in it, and reduce gradients in float32; pure_fp16: everything
    in float16, updates too; autocast: bfloat16 or float32 per operation, as torch chooses.
    """
    blocks: tuple[str, ...] = ()
    """Class names of the blocks; by default the model's own."""
    min_numbers: PositiveInt = 1000
    """Elements that make a unit if wrap is size."""
    skip: tuple[NonNegativeInt, ...] = ()
    """Blocks left out of the wrapping by mistake, counted from 0."""
    freeze: tuple[NonNegativeInt, ...] = ()
    """Blocks whose parameters are not trained, counted from 0."""
    ignore: tuple[str, ...] = ()
    """Class names of modules that FSDP leaves alone: whole on every rank, not averaged."""
    hybrid: PositiveInt | None = None
    """Shard over groups of this many ranks, and replicate between groups (HSDP)."""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    """FSDP1: gather the next unit before this one's gradients are computed, after, or not."""
    forward_prefetch: bool = False
    """FSDP1: gather the next unit before this one computes."""
    limit_all_gathers: bool = True
    """FSDP1: let the CPU run ahead of a GPU by two gathers at most."""
    use_orig_params: bool = True
    """FSDP1: keep the parameters' names; else each unit is one flat parameter."""
    offload: bool = False
    """Keep the shards in host memory."""
    scaler: bool = False
    """Scale the loss, and skip a step whose gradients are not finite on any rank."""
    scaler_init: PositiveFloat = 65536.0
    """Initial scale."""
    scaler_growth: PositiveInt = 2000
    """Good steps after which the scale is doubled."""
    accumulate: PositiveInt = 1
    """Batches per step, with averaged gradients, which become zero or None before it, in turn."""
    compile: bool = False
    """Compile each block with inductor."""
    compile_only: tuple[str, ...] = ()
    """Class names of modules to compile instead of the blocks."""
    delay_after_loss_ms: NonNegativeInt | None = None
    """Model delay: pause between loss and backward pass."""
    delay_before_reduction_ms: NonNegativeInt | None = None
    """Model delay: pause in each block's backward pass before its gradients are reduced."""
    delay_before_free_ms: NonNegativeInt | None = None
    """Model moe: pause before parameters of its expert and of the shared part are freed."""
    vocab: PositiveInt | None = None
    """Vocabulary size of hf_bert and hf_t5."""
    heads: PositiveInt | None = None
    """Attention heads in each layer of hf_bert and hf_t5; they must divide hidden."""
    mlp_ratio: PositiveInt | None = None
    """Inner width of the MLPs of hf_bert and hf_t5, in multiples of hidden."""
    tokens: PositiveInt | None = None
    """Tokens of a sample of hf_bert and hf_t5; hf_bert has an embedding for each position."""
    memory_cap_mib: PositiveInt | None = None
    """End a rank that allocates more MiB than this, counted before the model is built."""
    save: str = ""
    """Save the training after the last step: in a folder, or in one plain file, name.pt."""
    load: str = ""
    """Resume from a folder or file that save wrote, on any number of ranks."""
    checkpoints: str = ""
    """Save after every step in this folder on a shared disk, and resume from its newest complete
    save, on any number of ranks. Steps of earlier runs count; every run trains at least two.
    """
    input_grad: bool = False
    """Let the input require a gradient, which a check compares."""

    SIZES: ClassVar[tuple[str, ...]] = (
        *(*WrapConfig.SIZES, "vocab", "heads", "mlp_ratio", "tokens"),
        *("delay_after_loss_ms", "delay_before_reduction_ms", "delay_before_free_ms"),
    )

    def validate(self, world_size: int) -> None:
        super().validate(world_size)
        counted = {"skip": self.skip, "freeze": self.freeze}
        catalog.check_model(self.model, self.blocks, self.model_sizes(), **counted)
        catalog.check_model(self.model, (*self.ignore, *self.compile_only))
        if self.compile:
            requirements.refuse_without_compiler()

    def conflicts(self, world_size: int) -> Iterator[str]:
        """Yield a message for each choice of options that cannot work."""
        yield from super().conflicts(world_size)
        fsdp1 = [name for name in FSDP1_OPTIONS if getattr(self, name) != getattr(Config, name)]
        takes_numbers = catalog.MODELS[self.model].takes_numbers
        save, load, checkpoints = Path(self.save), Path(self.load), Path(self.checkpoints)
        saves = self.save or self.load or self.checkpoints
        if self.wrap == "none" and (self.offload or self.hybrid):
            yield "wrap none has no unit that could be offloaded or be hybrid: use wrap block"
        if self.skip and self.wrap != "block":
            yield f"skip {self.skip} leaves out blocks, but wrap is {self.wrap!r}: use wrap block"
        if self.hybrid and world_size % self.hybrid:
            groups = f"{world_size} ranks cannot be cut into groups of hybrid = {self.hybrid}"
            yield f"{groups}: it must divide them"
        if fsdp1 and self.fsdp != 1:
            yield f"{' and '.join(fsdp1)} is an option of FSDP1: use fsdp 1, or leave it out"
        if not self.use_orig_params and self.freeze:
            rule = "a flat parameter is trained or not as a whole"
            yield f"{rule}: leave out freeze, or use_orig_params False"
        if self.input_grad and (not takes_numbers or self.scaler):
            rule = "an input's gradient needs numbers, not tokens, and a loss that is not scaled"
            yield f"{rule}: use another model, or no scaler"
        if self.compile_only and not self.compile:
            yield f"compile_only {self.compile_only} says what compile compiles: set compile"
        if self.compile and self.checkpointing and self.delay_ms:
            rule = "a checkpointed block that sleeps does not compile"
            yield f"{rule}: leave out delay_ms or checkpointing"
        if saves and (self.model == "moe" or self.ignore or self.check != "none"):
            rule = "save, load and checkpoints are for training whose parameters all ranks share"
            yield f"{rule}: no moe, ignore or check"
        if self.checkpoints and (self.save or self.load or self.scaler):
            rule = "checkpoints save and load by themselves, and no scaler"
            yield f"{rule}: leave out save, load and scaler"
        if self.checkpoints and checkpoints.is_file():
            rule = f"checkpoints {self.checkpoints!r} is a file"
            yield f"{rule}: name a folder, which is made if need be"
        if self.save and (save.exists() or not save.absolute().parent.is_dir()):
            yield f"save {self.save!r} must be a new name in a folder that there is"
        if self.load and (problem := load_problem(load)):
            yield f"load {self.load!r} {problem}: give what save wrote"


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here, here.cap_memory(config.memory_cap_mib):
        run_session(config, here)


def run_session(config: Config, here: rank.Session) -> None:
    """Train and measure, or compare, within a session."""
    fsdp_wrap.silence_warnings()
    lab = build_model(config, here.device, here.rank)
    blocks = find_blocks(lab, config.blocks or lab.block_types)
    for block in blocks:
        delay_compute(block, config.delay_ms)
    here.emulate_units(blocks)
    mesh = make_mesh(config, here)
    model, units = parallelize_model(config, mesh, lab)
    scaler = make_grad_scaler(config, here.device)
    training = TrainingLoop(config, here, lab, model, scaler)
    if config.check == "none":
        # Traffic is counted by axis only where there are two.
        axes = sharding_mesh(mesh) if config.hybrid else None
        measure = partial(here.steps, units=units if config.timeline else None, mesh=axes)
        training.run(fsdp_wrap.make_adam(model), measure)
    else:
        here.finish_check(**check_parity(training))


def make_mesh(config: Config, here: rank.Session) -> DeviceMesh:
    """Make axes ``data`` and ``alone``, and before them ``replicate`` where sharding is hybrid."""
    # alone is the axis of modules that differ from rank to rank.
    if config.hybrid is None:
        return here.mesh(data=here.world_size, alone=1)
    groups = here.world_size // config.hybrid
    return here.mesh(replicate=groups, data=config.hybrid, alone=1)


def build_model(config: Config, device: torch.device, index: int) -> LabModel:
    """Build the model as rank ``index`` starts with it, some of its blocks frozen."""
    lab = fsdp_wrap.build_model(config, device, index)
    blocks = find_blocks(lab, config.blocks or lab.block_types)
    for index in config.freeze:
        blocks[index].requires_grad_(False)
    return lab


def parallelize_model(config: Config, mesh: DeviceMesh, lab: LabModel) -> tuple[nn.Module, Units]:
    """Apply all that was asked for, in torchtitan's order; return the model and its units."""
    blocks = config.blocks or lab.block_types
    # First, because shards and the optimizer's state take their dtype from the parameters.
    if config.precision == "pure_fp16":
        lab.half()
    # Before compiling, so that a compiled block contains its own recomputation.
    if config.checkpointing:
        apply_activation_checkpointing(lab, blocks)
    # Before FSDP, whose hooks gather and free around a block and stay outside of the compiled code.
    if config.compile:
        # Otherwise dropout would not draw what one device draws.
        eager_random = config.check == "parity"
        apply_compile(lab, config.compile_only or blocks, eager_random=eager_random)
    skip = config.skip + fsdp_wrap.forgotten_blocks(config, lab, blocks)
    # Last, because what FSDP shards must not be replaced or rounded any more.
    names = APPLY_FSDP_OPTIONS + (FSDP1_OPTIONS if config.fsdp == 1 else ())
    return apply_fsdp(lab, mesh, skip=skip, **{name: getattr(config, name) for name in names})


def make_grad_scaler(config: Config, device: torch.device) -> ShardedGradScaler:
    """Make the loss scaler, equal on all ranks; without ``config.scaler`` it does nothing."""
    scale: Any = {"init_scale": config.scaler_init, "growth_interval": config.scaler_growth}
    return ShardedGradScaler(device.type, enabled=config.scaler, **scale)


@dataclass
class TrainingLoop:
    """A rank's training: accumulated, scaled, saved and loaded as the Config says."""

    config: Config
    session: rank.Session
    lab: LabModel
    model: nn.Module
    scaler: ShardedGradScaler

    def run(self, optimizer: Optimizer, measure: rank.StepLoop) -> list[StepOutcome]:
        """Train in every step that ``measure`` gives; return what each one's last batch left."""
        config = self.config
        before, steps, save = self.resume(optimizer)
        tracked = fsdp_wrap.trackable(config, self.model, optimizer)
        outcomes: list[StepOutcome] = []
        # A save comes after a step's clock has stopped.
        measured = measure(steps, track=tracked, after=lambda: save(before + len(outcomes)))
        for index, step in enumerate(measured, start=before):
            optimizer.zero_grad(set_to_none=config.accumulate == 1 or bool(index % 2))
            batches = [self.run_batch(index, batch, step) for batch in range(config.accumulate)]
            with step.span("optimizer"):
                self.scaler.step(optimizer)
                self.scaler.update()
            loss = torch.stack([batch.loss for batch in batches]).mean()
            step.record_scalar("loss", loss, before=before)
            outcomes.append(batches[-1])
        if config.compile:
            self.session.record_scalar("compiled_graphs", count_compiled_graphs())
        if config.save:
            save_training(Path(config.save), self.model, optimizer, before + len(outcomes))
        return outcomes

    def resume(self, optimizer: Optimizer) -> tuple[int, int, Callable[[int], None]]:
        """Load a training; return its steps, those to measure, and what saves after each."""
        config, load = self.config, Path(self.config.load)
        if not config.checkpoints:
            done = load_training(load, self.model, optimizer) if config.load else 0
            return done, config.steps, lambda step: None
        folder = CheckpointFolder(Path(config.checkpoints))
        done = folder.load(self.model, optimizer)
        return done, max(0, config.steps - done), partial(folder.save, self.model, optimizer)

    def run_batch(self, index: int, batch: int, step: Step) -> StepOutcome:
        """Run forward and backward pass of one of a step's batches."""
        config, here = self.config, self.session
        place = index, here.rank, batch, config.accumulate
        with step.untimed():
            inputs = parity.draw_samples(self.lab, here.device, *place)
        # FSDP casts inputs only under mixed precision.
        if config.precision == "pure_fp16":
            inputs = tuple(cast_floats(each, torch.float16) for each in inputs)
        if config.input_grad:
            inputs = require_gradients(inputs)
        enabled, keep = config.precision == "autocast", config.check == "parity"
        how: Any = {"scale": lambda loss: self.scaler.scale(loss / config.accumulate)}
        how["autocast"] = torch.autocast(here.device.type, torch.bfloat16, enabled=enabled)
        return forward_backward(step, self.lab, self.model, inputs, keep=keep, **how)


def check_parity(training: TrainingLoop) -> dict[str, Any]:
    """Train, and return the verdict on every step beside one device's. A collective."""
    config, here = training.config, training.session
    dtype, rounding = PRECISION_DTYPES[config.precision]
    steps = fsdp_wrap.steps_to_compare(config.steps, dtype)
    optimizer = parity.make_sgd(training.model)
    trained = training.run(optimizer, partial(here.plain_steps, most=steps))
    one_device = parity.OneDevice(
        partial(build_model, config, here.device),
        here.world_size,
        dtype,
        config.accumulate,
        rounding=rounding,
        mean=True,
        local_types=config.ignore,
        input_gradients=config.input_grad,
    )
    how = {"rank": here.rank, "steps": steps}
    verdict = compare_fsdp_training(one_device, training.model, trained, **how)
    if config.scaler:
        # A scale of at most 1 means that nearly every step was skipped.
        scale = training.scaler.get_scale()
        verdict |= {"scale": scale, "ok": verdict["ok"] and scale > 1}
    if config.compile:
        graphs = count_compiled_graphs()
        verdict |= {"compiled_graphs": graphs, "ok": verdict["ok"] and graphs > 0}
    return verdict


if __name__ == "__main__":
    rank.run_main(main, Config)
