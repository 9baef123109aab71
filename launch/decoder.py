"""Train a Llama-like decoder with FSDP, hybrid sharding, tensor parallelism, or a mixture.

    torchrun --standalone --nproc-per-node 4 -m launch.decoder --tp 2 --check parity
    torchrun --standalone --nproc-per-node 8 -m launch.decoder --preset paper        # Llama 2 7B
    python -m labkit simulate decoder --world-size 1024 --model llama_3_70b --tp 8   # on a laptop

Shapes are those of ``labkit_simulate.theory.transformer``. Of a large model each rank makes only
what it keeps; for a check it builds the whole model, which is equal on all ranks.
"""

import contextlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from labkit import parity, rank
from labkit.config import PositiveInt
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks
from labkit.parallel.fsdp import Precision, apply_fsdp
from labkit.parallel.units import Units
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training, forward_backward
from labkit.theory.sizes import even_share
from labkit.theory.two_dim import count_tp_lines
from labkit_simulate.decoder import DecoderModel, apply_decoder_tensor_parallel
from labkit_simulate.theory import transformer

# Each model's shape, and the sequence length with which it was trained.
SHAPES = {
    "tiny": (transformer.TINY_DECODER, 16),
    "llama_2_7b": (transformer.LLAMA_2_7B, 4096),
    "llama_2_13b": (transformer.LLAMA_2_13B, 4096),
    "llama_3_8b": (transformer.LLAMA_3_8B, 8192),
    "llama_3_70b": (transformer.LLAMA_3_70B, 8192),
}


@dataclass
class Config:
    """Which decoder, how ranks share it, and what is measured."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine, paper is Llama 2 with 7 billion parameters, for GPUs."""
    model: Literal["tiny", "llama_2_7b", "llama_2_13b", "llama_3_8b", "llama_3_70b"] = "tiny"
    """The model's shape."""
    layers: PositiveInt | None = None
    """Number of blocks, if not the model's own."""
    sequence: PositiveInt | None = None
    """Tokens per sequence; by default as in the model's training."""
    batch: PositiveInt = 2
    """Sequences per step and line of tp; ranks of a line take the same ones."""
    tp: PositiveInt = 1
    """Ranks that share every matrix: neighbours, so that they are on one host."""
    seq: bool = False
    """Also cut the sequence over tp between the pairs of matrices (sequence parallel)."""
    hybrid: PositiveInt | None = None
    """Shard over groups of this many lines of tp, and replicate between groups (HSDP)."""
    wrap: Literal["none", "root", "block"] = "block"
    """FSDP's units: each block, or the whole model; none: every rank holds all, as with DDP."""
    reshard: bool = True
    """Free a unit's parameters after its forward pass; gather them again in the backward pass."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute blocks in the backward pass: fully, or all but attention and every other GEMM."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: parameters are gathered and used in it, gradients are reduced in float32."""
    steps: PositiveInt = 4
    """Timed steps, after one to warm up; with a check, compared steps."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"model": "llama_2_7b", "batch": 1, "precision": "bf16", "checkpointing": "full",
                  "steps": 20},
    }  # fmt: skip
    CANDIDATES: ClassVar[dict[str, list[Any]]] = {
        "tp": [1, 2, 4, 8],
        "hybrid": [None, 8],
        "checkpointing": ["none", "selective", "full"],
        "precision": ["float32", "bf16"],
    }
    ALIKE: ClassVar[str] = "layers"

    def validate(self, world_size: int) -> None:
        tp, lines = self.tp, count_tp_lines(world_size, self.tp, self.seq)
        if self.hybrid and lines % self.hybrid:
            groups = f"which cannot be cut into groups of hybrid = {self.hybrid}"
            rule = f"{world_size} ranks are {lines} lines of tp = {tp}, {groups}"
            raise ValueError(f"{rule}: it must divide them")
        for what in ("kv_heads", "feedforward", "vocab"):
            even_share(getattr(self.decoder_shape(), what), tp, f"{what} =")
        if self.seq:
            even_share(self.tokens(), tp, "a sequence of")
        if self.wrap == "none" and (tp > 1 or self.hybrid or self.precision != "float32"):
            rule = "wrap none replicates plain float32 parameters"
            raise ValueError(f"{rule}: use wrap block for tp, hybrid and bf16")

    def decoder_shape(self) -> transformer.DecoderShape:
        """Return the model's shape with this run's number of layers."""
        whole = SHAPES[self.model][0]
        return replace(whole, layers=self.layers or whole.layers)

    def tokens(self) -> int:
        """Return the tokens of a sequence."""
        return self.sequence or SHAPES[self.model][1]

    def starts_on_meta(self) -> bool:
        """Tell whether no rank ever holds the whole model."""
        # Hybrid sharding needs equal replicas, and on the CPU each rank draws numbers of its own.
        is_sharded = self.wrap != "none" and self.hybrid is None
        return is_sharded and self.model != "tiny" and self.check == "none"

    def blocks(self) -> int:
        """Return the number of equal blocks, which ``ALIKE`` names."""
        return self.decoder_shape().layers


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        mesh = make_mesh(config, here)
        on_meta = config.starts_on_meta() and here.tensors_have_values
        lab = build_model(config, torch.device("meta") if on_meta else here.device)
        here.emulate_units(find_blocks(lab, lab.block_types), share=1 / config.tp)
        model, units = parallelize_model(config, mesh, lab)
        if on_meta:
            fill_model(lab, here)
        if config.check == "none":
            measure = partial(here.steps, units=units if config.timeline else None, mesh=mesh)
            train(config, here, lab, model, make_adam(model), measure)
            return
        # In bf16 the second step already starts from weights that rounding has moved apart.
        exact = config.precision == "float32"
        steps, dtype = (config.steps, torch.float32) if exact else (1, torch.bfloat16)
        measure = partial(here.plain_steps, most=steps)
        trained = train(config, here, lab, model, parity.make_sgd(model), measure)
        lines, line = here.world_size // config.tp, here.rank // config.tp
        one_device = parity.OneDevice(partial(build_model, config, here.device), lines, dtype)
        verdict = compare_fsdp_training(one_device, model, trained, rank=line, steps=steps)
        here.finish_check(**verdict)


def make_mesh(config: Config, here: rank.Session) -> DeviceMesh:
    """Make axes ``data`` and ``tp``, and before them ``replicate`` where sharding is hybrid."""
    lines = here.world_size // config.tp
    if config.hybrid is None:
        return here.mesh(data=lines, tp=config.tp)
    return here.mesh(replicate=lines // config.hybrid, data=config.hybrid, tp=config.tp)


def build_model(config: Config, device: torch.device, line: int = 0) -> DecoderModel:
    """Build the model, equal on all ranks."""
    # One seed for all ranks and lines, so that each can keep its part of the same model.
    torch.manual_seed(0)
    shape = asdict(config.decoder_shape())
    with device if device.type == "meta" else contextlib.nullcontext():
        return DecoderModel(**shape, sequence=config.tokens(), batch=config.batch).to(device)


def fill_model(lab: DecoderModel, here: rank.Session) -> None:
    """Draw the parts that this rank keeps of a model from the meta device."""
    lab.to_empty(device=here.device)
    # On GPUs DTensor draws other numbers on each rank from one seed, but on the CPU the same ones.
    torch.manual_seed(here.rank if here.device.type == "cpu" else 0)
    lab.reset_parameters()


def parallelize_model(
    config: Config, mesh: DeviceMesh, lab: DecoderModel
) -> tuple[nn.Module, Units]:
    """Apply tensor parallelism, checkpointing and FSDP; return the model and its units."""
    # FSDP comes last, and shards what tensor parallelism has left on each rank.
    if config.tp > 1:
        apply_decoder_tensor_parallel(lab, mesh, sequence_parallel=config.seq)
    if config.checkpointing != "none":
        selective = config.checkpointing == "selective"
        apply_activation_checkpointing(lab, lab.block_types, selective=selective)
    # Gradients are reduced in float32 in both.
    precision: Precision = "fp32" if config.precision == "float32" else "bf16"
    how: Any = {"precision": precision, "reshard_after_forward": config.reshard}
    return apply_fsdp(lab, mesh, wrap=config.wrap, **how)


def make_adam(model: nn.Module) -> Optimizer:
    """Make a fused Adam with one group for each block and mesh."""
    # A fused kernel accepts no mixture of meshes, and DTensor is slow with long lists.
    together: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        together.setdefault((*name.split(".")[:2], axes), []).append(parameter)
    return torch.optim.Adam([{"params": group} for group in together.values()], lr=1e-3, fused=True)


def train(
    config: Config,
    here: rank.Session,
    lab: DecoderModel,
    model: nn.Module,
    optimizer: Optimizer,
    measure: rank.StepLoop,
) -> list[StepOutcome]:
    """Train in every step that ``measure`` gives; return what each one left."""
    trained: list[StepOutcome] = []
    for index, step in enumerate(measure(config.steps, track=[model, optimizer])):
        # Each line of tp has its own samples.
        with step.untimed():
            inputs = parity.draw_samples(lab, here.device, index, here.rank // config.tp)
        optimizer.zero_grad()
        # Computes the loss of logits that are cut over the vocabulary.
        with loss_parallel() if config.tp > 1 else contextlib.nullcontext():
            outcome = forward_backward(step, lab, model, inputs, keep=config.check == "parity")
        with step.span("optimizer"):
            optimizer.step()
        loss = outcome.loss
        # A replicated DTensor under loss_parallel.
        step.record_scalar("loss", loss.to_local() if isinstance(loss, DTensor) else loss)
        trained.append(outcome)
    return trained


if __name__ == "__main__":
    rank.run_main(main, Config)
