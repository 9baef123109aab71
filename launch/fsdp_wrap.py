"""Train a model that FSDP shards, and choose what it wraps.

    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap                                  # small, any machine
    torchrun --standalone --nproc-per-node 2 -m launch.fsdp_wrap --model hf_bert --check parity   # equal to one device?
    torchrun --standalone --nproc-per-node 4 -m launch.fsdp_wrap --preset paper                   # four GPUs

What is wrapped together is gathered together, just before it computes: one unit holds all parameters at once, many
small units send many small messages.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit import parity, rank, requirements
from labkit.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from labkit.models import catalog
from labkit.models.delay import delay_compute
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks, freeze_blocks
from labkit.parallel.compiling import apply_compile, count_compiled_graphs
from labkit.parallel.fsdp import apply_fsdp, random_block_index, sharding_mesh
from labkit.parallel.saving import CheckpointFolder, load_training, save_training
from labkit.parallel.small_fsdp import FlatShards, shard_unit
from labkit.parallel.units import Units, fsdp_units, layer_types
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training
from labkit.parity.one_device import Rounding, cast_floats, require_gradients
from labkit.session.meter import Step
from labkit.torch_private import tree_map_only

COMMON_OPTIONS = ("wrap", "fsdp", "blocks", "skip", "precision", "offload", "reshard_after_forward", "prefetch", "ignore")
NOT_IN_SMALL_FSDP = (
    *("skip", "forget", "precision", "offload", "reshard_after_forward", "prefetch", "ignore", "freeze", "hybrid"),
    *("checkpointing", "compile", "accumulate", "timeline", "save", "load", "checkpoints"),
)
"""Options that a small FSDP of one's own does not have."""
VALUES_NOT_IN_SMALL_FSDP = {"model": "moe", "wrap": "none"}
FSDP1_OPTIONS = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
SIZE_OPTIONS = (
    "hidden",
    "narrow",
    "dim",
    "layers",
    "vocab",
    "batch",
    "delay_after_loss_ms",
    "delay_before_reduction_ms",
    "delay_before_free_ms",
)
PRECISION_DTYPES: dict[str, tuple[torch.dtype, Rounding]] = {
    "fp32": (torch.float32, "parameters"),
    "bf16": (torch.bfloat16, "parameters"),
    "fp16": (torch.float16, "parameters"),
    "pure_fp16": (torch.float16, "everything"),
    "autocast": (torch.bfloat16, "autocast"),
}


@dataclass
class Config:
    """Which model, how it is wrapped, and what is measured."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine, paper is the model that the small one stands for, for GPUs."""
    model: Literal[
        "toy",
        "hf_bert",
        "hf_t5",
        "transformer",
        "nested",
        "nonuniform",
        "delay",
        "moe",
        "mlp_stack",
        "double_linear",
        "unused_linear",
        "skip",
    ] = "toy"
    """What is trained; hf_bert and hf_t5 need transformers."""
    wrap: Literal["none", "root", "block", "layer", "every", "size", "yours"] = "block"
    """Units: none (every rank holds all), the whole model, each block of the model, each layer with parameters, every
    module that holds any, those with min_numbers of them; yours are those that is_unit of use= chooses."""
    blocks: tuple[str, ...] = ()
    """Class names of the blocks, instead of the model's own."""
    min_numbers: PositiveInt = 1000
    """How many numbers make a unit where wrap is size."""
    skip: tuple[NonNegativeInt, ...] = ()
    """Blocks that are left out of the wrapping by mistake, counted from 0: to see what that looks like."""
    forget: NonNegativeInt | None = None
    """Leave out one block of the model, drawn with this seed: a riddle."""
    freeze: tuple[NonNegativeInt, ...] = ()
    """Blocks whose parameters are not trained, counted from 0."""
    ignore: tuple[str, ...] = ()
    """Class names of modules that FSDP leaves alone: whole on every rank, their gradients averaged by nobody."""
    hybrid: PositiveInt | None = None
    """Shard over groups of so many ranks, and replicate from group to group (HSDP)."""
    fsdp: Literal[1, 2, "yours"] = 2
    """FullyShardedDataParallel (1) or fully_shard (2); yours is small_fsdp of use=, called with each unit."""
    reshard_after_forward: bool = True
    """Free a unit's full parameters after its forward pass, and gather them again in the backward pass."""
    prefetch: bool = False
    """Gather a unit while the one before it computes, on gloo as well (FSDP2 on NCCL does so anyway)."""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    """FSDP1: gather the next unit before this one's gradients are computed, after, or when it is needed."""
    forward_prefetch: bool = False
    """FSDP1: gather the next unit before this one computes."""
    limit_all_gathers: bool = True
    """FSDP1: let the CPU run ahead of a GPU by two gathers at most."""
    use_orig_params: bool = True
    """FSDP1: keep the parameters' names; else each unit is one flat parameter."""
    checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass."""
    precision: Literal["fp32", "bf16", "fp16", "pure_fp16", "autocast"] = "fp32"
    """bf16, fp16: parameters are gathered and used in it, gradients are reduced in float32; pure_fp16: all is in
    float16, updates as well; autocast: each operation in bfloat16 or float32, as torch sees fit."""
    offload: bool = False
    """Keep the shards in host memory."""
    scaler: bool = False
    """Scale the loss, and skip a step whose gradients are not finite on any rank."""
    scaler_init: PositiveFloat = 65536.0
    """The scale to begin with."""
    scaler_growth: PositiveInt = 2000
    """Good steps after which the scale is doubled."""
    accumulate: PositiveInt = 1
    """Batches of a rank in a step, whose gradients are averaged; set to zero and to None before it in turn."""
    compile: bool = False
    """Compile each block with inductor."""
    compile_only: tuple[str, ...] = ()
    """Class names of what compile compiles, instead of the blocks."""
    delay_ms: NonNegativeFloat = 0.0
    """Make each block's forward and backward pass last longer by this."""
    delay_after_loss_ms: NonNegativeInt | None = None
    """Model delay: pause between loss and backward pass."""
    delay_before_reduction_ms: NonNegativeInt | None = None
    """Model delay: pause in each block's backward pass before its gradients are reduced."""
    delay_before_free_ms: NonNegativeInt | None = None
    """Model moe: pause before the gathered parameters of its expert and of the shared part are freed."""
    hidden: PositiveInt | None = None
    """Width of the toy model's wide layers, or of hf_bert and hf_t5."""
    narrow: PositiveInt | None = None
    """Width of the toy model's narrow layers."""
    dim: PositiveInt | None = None
    """Width of mlp_stack, double_linear, unused_linear and skip."""
    layers: PositiveInt | None = None
    """Layers of hf_bert and hf_t5, blocks of mlp_stack."""
    vocab: PositiveInt | None = None
    """Words that hf_bert and hf_t5 know."""
    batch: PositiveInt | None = None
    """Samples of a rank in a step, where the model can choose."""
    steps: PositiveInt = 5
    """Timed steps, after one to warm up; with a check, compared steps."""
    memory_cap_mib: PositiveInt | None = None
    """End a rank that allocates more than this beyond what it holds before the model is made."""
    save: str = ""
    """Where to save the training after the last step: a folder, or one plain file that ends in .pt."""
    load: str = ""
    """What to go on with: a folder or file that save wrote, on any number of ranks."""
    checkpoints: str = ""
    """A folder on a disk that all ranks share: save in it after every step, and begin with the newest complete save, on
    any number of ranks. Steps of earlier runs count as steps of this one, which trains two at least."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    input_grad: bool = False
    """Let the input need a gradient; a check compares it."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"steps": 20}}

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        entry = catalog.check_model(self.model, self.blocks, self.model_sizes(), skip=self.skip, freeze=self.freeze)
        catalog.check_model(self.model, (*self.ignore, *self.compile_only))
        if self.wrap == "none" and (self.precision in ("bf16", "fp16") or self.offload or self.hybrid):
            raise ValueError(
                "wrap none has no unit that could gather in a short type, be offloaded or be hybrid: use wrap root or block"
            )
        if (self.skip or self.forget is not None) and self.wrap != "block":
            name = "skip" if self.skip else "forget"
            left_out = f"{name} {getattr(self, name)} leaves out blocks"
            raise ValueError(f"{left_out}, but wrap is {self.wrap!r}: use wrap block")
        if self.hybrid and world_size % self.hybrid:
            raise ValueError(f"{world_size} ranks cannot be cut into groups of hybrid = {self.hybrid}: it must divide them")
        own = [name for name in FSDP1_OPTIONS if getattr(self, name) != getattr(Config, name)]
        if own and self.fsdp != 1:
            raise ValueError(f"{own[0]} is an option of FSDP1: use fsdp 1, or leave it out")
        changed = [name for name in NOT_IN_SMALL_FSDP if getattr(self, name) != getattr(Config, name)]
        changed += [f"{name} {value}" for name, value in VALUES_NOT_IN_SMALL_FSDP.items() if getattr(self, name) == value]
        if self.fsdp == "yours" and changed:
            raise ValueError(
                f"{changed[0]} is not for fsdp yours, which shards units of shared parameters, "
                "trained in float32: use fsdp 2, or leave it out"
            )
        if self.fsdp == 1 and not self.use_orig_params and self.freeze:
            raise ValueError("a flat parameter is trained or not as a whole: leave out freeze, or use_orig_params False")
        if self.input_grad and (not entry.takes_numbers or self.scaler):
            raise ValueError(
                "an input's gradient needs numbers, not tokens, and a loss that is not scaled: use another model, or no scaler"
            )
        if self.compile_only and not self.compile:
            raise ValueError(f"compile_only {self.compile_only} says what compile compiles: set compile")
        if self.compile:
            requirements.refuse_without_compiler()
        if self.compile and self.checkpointing and self.delay_ms:
            raise ValueError("a checkpointed block that sleeps does not compile: leave out delay_ms or checkpointing")
        saves = self.save or self.load or self.checkpoints
        if saves and (self.model == "moe" or self.ignore or self.check != "none"):
            names = "save, load and checkpoints"
            raise ValueError(f"{names} are for training whose parameters all ranks share: no moe, ignore or check")
        if self.checkpoints and (self.save or self.load or self.scaler):
            raise ValueError("checkpoints save and load by themselves, and no scaler: leave out save, load and scaler")
        if self.checkpoints and Path(self.checkpoints).is_file():
            raise ValueError(f"checkpoints {self.checkpoints!r} is a file: name a folder, which is made if need be")
        if self.save and (Path(self.save).exists() or not Path(self.save).absolute().parent.is_dir()):
            raise ValueError(f"save {self.save!r} must be a new name in a folder that there is")
        if self.load and not Path(self.load).exists():
            raise ValueError(f"load {self.load!r} is not there: give what save wrote")

    def model_sizes(self) -> dict[str, int]:
        """Those that were asked for; the model knows the rest."""
        paper = catalog.MODELS[self.model].paper if self.preset == "paper" else {}
        asked = {name: getattr(self, name) for name in SIZE_OPTIONS}
        return {**paper, **{name: size for name, size in asked.items() if size is not None}}


@rank.replaceable
def is_unit(module: nn.Module) -> bool:
    """Whether FSDP gathers this module's parameters together, as a unit; asked of every module but the root."""
    return type(module).__name__ == "Linear"


@rank.replaceable
def small_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit's parameters in place; returns this rank's flat share of them, which is trained."""
    return shard_unit(unit)


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here, here.cap_memory(config.memory_cap_mib):
        run_session(config, here)


def run_session(config: Config, here: rank.Session) -> None:
    """The same within a session."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of a unit, which nobody changes in place
    warnings.filterwarnings("ignore", message=".*(into_tensor|scatter_tensor)` is deprecated")  # 2.13 has other names
    warnings.filterwarnings("ignore", message="Expected a tensor or a traceable wrapper")  # a tracker on p.grad = None
    lab = build_model(config, here.device, here.rank)
    for block in find_blocks(lab, config.blocks or lab.block_types):
        delay_compute(block, config.delay_ms)
    mesh = make_mesh(config, here)
    model, units = parallelize_model(config, mesh, lab)
    scaler = make_grad_scaler(config, here.device)
    training = TrainingLoop(config, here, lab, model, scaler)
    if config.check == "none":
        lines = sharding_mesh(mesh) if config.hybrid else None
        measure = partial(here.steps, units=units if config.timeline else None, mesh=lines)
        training.run(make_adam(model), measure)
        return
    dtype, rounding = PRECISION_DTYPES[config.precision]
    steps = config.steps if dtype == torch.float32 else min(config.steps, 1)  # from the second on rounding decides
    trained = training.run(parity.make_sgd(model), partial(here.plain_steps, most=steps))
    one_device = parity.OneDevice(
        partial(build_model, config, here.device),
        here.world_size,
        dtype,
        here.device,
        config.accumulate,
        rounding=rounding,
        mean=True,
        local_types=config.ignore,
        input_gradients=config.input_grad,
    )
    whole = model.unshard_model() if isinstance(model, FlatShards) else model
    verdict = compare_fsdp_training(one_device, whole, trained, rank=here.rank, steps=steps)
    if config.scaler:
        verdict |= {"scale": scaler.get_scale(), "ok": verdict["ok"] and scaler.get_scale() > 1}
    if config.compile:
        verdict |= {"compiled_graphs": count_compiled_graphs(), "ok": verdict["ok"] and count_compiled_graphs() > 0}
    here.finish_check(**verdict)


def make_mesh(config: Config, here: rank.Session) -> DeviceMesh:
    """Axes ``data`` and ``alone``, and ``replicate`` before them where groups of ranks replicate each other."""
    if config.hybrid is None:
        return here.mesh(data=here.world_size, alone=1)
    return here.mesh(replicate=here.world_size // config.hybrid, data=config.hybrid, alone=1)


def build_model(config: Config, device: torch.device, index: int) -> LabModel:
    """The model as rank ``index`` starts with it; only experts differ from rank to rank."""
    lab = catalog.create_model(config.model, seed=0, expert_seed=index, **config.model_sizes()).to(device)
    freeze_blocks(lab, config.blocks or lab.block_types, config.freeze)
    return lab


def parallelize_model(config: Config, mesh: DeviceMesh, lab: LabModel) -> tuple[nn.Module, Units]:
    """The model on the mesh, and its units."""
    blocks = config.blocks or lab.block_types
    if config.precision == "pure_fp16":
        lab.half()
    if config.checkpointing:
        apply_activation_checkpointing(lab, blocks)
    if config.compile:
        apply_compile(lab, config.compile_only or blocks, eager_random=config.check == "parity")
    if config.fsdp == "yours":
        types = is_unit if config.wrap == "yours" else {"block": blocks, "layer": layer_types(lab)}.get(config.wrap, ())
        units = fsdp_units(lab, types) or {"": [lab]}
        return FlatShards(lab, {name: modules[0] for name, modules in units.items()}, small_fsdp), units
    own = {name: getattr(config, name) for name in (FSDP1_OPTIONS if config.fsdp == 1 else ())}
    how = {name: getattr(config, name) for name in COMMON_OPTIONS}
    if config.forget is not None:
        how["skip"] = (*config.skip, random_block_index(config.forget, len(find_blocks(lab, blocks))))
    return apply_fsdp(lab, mesh, is_unit=is_unit, min_numbers=config.min_numbers, **how, **own)


def make_grad_scaler(config: Config, device: torch.device) -> ShardedGradScaler:
    """What scales the loss, on all ranks alike; without ``config.scaler`` by 1."""
    scale, steps = config.scaler_init, config.scaler_growth
    return ShardedGradScaler(device.type, enabled=config.scaler, init_scale=scale, growth_interval=steps)


def make_adam(model: nn.Module) -> Optimizer:
    """Adam in one kernel for all shards, and one for what is no shard: it takes no mixture."""
    trained = [p for p in model.parameters() if p.requires_grad]
    shards = [p for p in trained if isinstance(p, DTensor)]
    plain = [p for p in trained if not isinstance(p, DTensor)]
    return torch.optim.Adam([{"params": group} for group in (shards, plain) if group], lr=1e-3, fused=True)


@dataclass
class TrainingLoop:
    """What trains, and how."""

    config: Config
    session: rank.Session
    lab: LabModel
    model: nn.Module
    scaler: ShardedGradScaler

    def run(self, optimizer: Optimizer, measure: rank.StepLoop) -> list[StepOutcome]:
        """Forward, backward and update in every measured step; what each left behind."""
        config = self.config
        before, steps, save = self.resume_training(optimizer)
        # FSDP1's views elude a tracker
        tracked = [self.model, optimizer] if config.fsdp != 1 or config.wrap == "none" else []
        trained: list[StepOutcome] = []
        measured = measure(steps, track=tracked, after=lambda: save(before + len(trained)))
        for index, step in enumerate(measured, start=before):
            optimizer.zero_grad(set_to_none=config.accumulate == 1 or bool(index % 2))
            batches = [self.run_batch(index, batch, step) for batch in range(config.accumulate)]
            with step.span("optimizer"):
                self.scaler.step(optimizer)
                self.scaler.update()
            step.record_scalar("loss", torch.stack([batch.loss.detach() for batch in batches]).mean(), before=before)
            trained.append(batches[-1])
        if config.compile:
            self.session.record_scalar("compiled_graphs", count_compiled_graphs())
        if config.save:
            save_training(Path(config.save), self.model, optimizer, before + len(trained))
        return trained

    def resume_training(self, optimizer: Optimizer) -> tuple[int, int, Callable[[int], None]]:
        """Load what this run goes on with: the steps trained so far, those to measure, and what saves after each."""
        config = self.config
        if not config.checkpoints:
            done = load_training(Path(config.load), self.model, optimizer) if config.load else 0
            return done, config.steps, lambda step: None
        checkpoints = CheckpointFolder(Path(config.checkpoints))
        done = checkpoints.load(self.model, optimizer)
        return done, max(0, config.steps - done), partial(checkpoints.save, self.model, optimizer)

    def run_batch(self, index: int, batch: int, step: Step) -> StepOutcome:
        """Forward and backward pass of one of a step's batches."""
        config, here = self.config, self.session
        inputs = parity.draw_samples(self.lab, here.device, index, here.rank, batch, config.accumulate)
        if config.precision == "pure_fp16":
            inputs = tuple(cast_floats(each, torch.float16) for each in inputs)
        if config.input_grad:
            inputs = require_gradients(inputs)
        autocast = torch.autocast(here.device.type, torch.bfloat16, enabled=config.precision == "autocast")
        with step.span("forward"), autocast:
            output = self.model(*inputs)
            loss = self.lab.get_loss(inputs, output)
        # what is measured holds no more than training needs
        kept = (tree_map_only(Tensor, Tensor.detach, output), inputs) if config.check == "parity" else (None, ())
        del output
        with step.span("backward"):
            self.lab.run_backward(self.scaler.scale(loss / config.accumulate))
        return StepOutcome(loss, *kept)


if __name__ == "__main__":
    rank.run_main(main, Config)
