"""Train on a mesh of two axes: ``tp`` shares every matrix, ``data`` shares the samples.

    torchrun --standalone --nproc-per-node 4 -m launch.two_dim    # FSDP x TP
    torchrun --standalone --nproc-per-node 4 -m launch.two_dim --seq --check parity
    torchrun --standalone --nproc-per-node 4 -m launch.two_dim --plan ddp_tp --check parity

``--network transformer`` trains two blocks of attention and a gated MLP in place of three MLPs.
``--layers yours`` takes column_parallel and row_parallel, which a notebook may replace (``use=``).
``--tp 1`` is pure data parallelism, ``--tp 4`` on four ranks pure tensor parallelism.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from labkit import rank, requirements
from labkit.config import PositiveInt
from labkit.models.blocks import HEAD_WIDTH, BlockStack
from labkit.models.chain import LinearChain
from labkit.models.mlp import MLPStack
from labkit.parallel import small_tensor_parallel
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks
from labkit.parallel.compiling import apply_compile
from labkit.parallel.ddp import apply_replicate
from labkit.parallel.fsdp import apply_fsdp2
from labkit.parallel.tensor_parallel import (
    apply_block_tensor_parallel,
    apply_plain_tensor_parallel,
    apply_tensor_parallel,
    mlp_stack_plan,
    transformer_plan,
)
from labkit.parity import draw_samples
from labkit.parity.two_dim import compare_mesh_training
from labkit.theory import two_dim as theory
from labkit.theory.sizes import even_share

Network = MLPStack | BlockStack | LinearChain


@dataclass
class Config:
    """How the mesh is cut, and what runs along its axes."""

    preset: Literal["small", "paper"] = "small"
    """Sizes: small runs on any machine, paper is the width of the test behind ddp_tp."""
    plan: Literal["fsdp_tp", "ddp_tp"] = "fsdp_tp"
    """Along data: fsdp_tp shards the network, cut over tp as tensor_parallel_plan of use= says;
    ddp_tp replicates four linear layers.
    """
    network: Literal["mlp_stack", "transformer"] = "mlp_stack"
    """What fsdp_tp trains: three MLPs, or two transformer blocks with heads of 8 features."""
    layers: Literal["dtensor", "yours"] = "dtensor"
    """Layers of fsdp_tp: PyTorch's, by a plan, or column_parallel and row_parallel of use=."""
    seq: bool = False
    """Also cut the sequence over tp between the MLPs (sequence parallel)."""
    checkpointing: bool = False
    """Recompute each MLP in the backward pass (fsdp_tp)."""
    tp: PositiveInt = 2
    """Ranks that share a matrix; the others are along data."""
    dim: PositiveInt = 64
    """Width of the network."""
    batch: PositiveInt = 8
    """Samples of all ranks in a step; each line of tp takes its part."""
    steps: PositiveInt = 3
    """Timed steps, after one to warm up; with a check, compared steps."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""
    compile: bool = True
    """With a check: also train a compiled version; needs a C++ compiler."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"dim": 2000}}

    def validate(self, world_size: int) -> None:
        fsdp_tp, compiles = self.plan == "fsdp_tp", self.check == "parity" and self.compile
        lines = theory.count_tp_lines(world_size, self.tp, self.seq)
        if (self.seq or self.checkpointing) and not fsdp_tp:
            rule = f"seq and checkpointing are for MLPs, and plan {self.plan} has none"
            raise ValueError(f"{rule}: use plan fsdp_tp")
        if self.layers == "yours" and (not fsdp_tp or self.seq or self.tp == 1):
            rule = "layers yours share the pairs of plan fsdp_tp"
            raise ValueError(f"{rule}, with the sequence whole, and tp 2 or more")
        if self.layers == "yours" and compiles:
            rule = "layers yours are compared as they are, not compiled"
            raise ValueError(f"{rule}: use compile False")
        if self.network == "transformer":
            if not fsdp_tp or self.seq or self.layers == "yours":
                rule = "a transformer is cut by plan fsdp_tp, with the sequence whole"
                raise ValueError(f"{rule} and layers dtensor")
            if self.dim % HEAD_WIDTH:
                rule = f"a width of {self.dim} makes no whole heads of {HEAD_WIDTH} features"
                raise ValueError(f"{rule}: {self.dim} % {HEAD_WIDTH} = {self.dim % HEAD_WIDTH}")
            even_share(self.dim // HEAD_WIDTH, self.tp, "heads, of which there are")
        even_share(self.batch, lines, "a batch of")
        # FSDP cuts each rank's share of a matrix once more; DDP does not.
        even_share(self.dim, world_size if fsdp_tp else self.tp, "a width of")
        if compiles:
            requirements.refuse_without_compiler()


@rank.replaceable
def column_parallel(layer: nn.Linear, group: ProcessGroup) -> nn.Module:
    """Return one rank's share of a pair's first layer, with ``weight`` and ``bias``."""
    return small_tensor_parallel.ColumnParallel(layer, group)


@rank.replaceable
def row_parallel(layer: nn.Linear, group: ProcessGroup) -> nn.Module:
    """Return one rank's share of a pair's second layer, with ``weight`` and ``bias``."""
    return small_tensor_parallel.RowParallel(layer, group)


@rank.replaceable
def tensor_parallel_plan(model: MLPStack | BlockStack) -> dict[str, ParallelStyle]:
    """Return ColwiseParallel(), RowwiseParallel() or others by name of a network's modules."""
    if isinstance(model, BlockStack):
        return transformer_plan()
    return mlp_stack_plan(model, sequence_parallel=False)


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        mesh = here.mesh(data=here.world_size // config.tp, tp=config.tp)
        if config.check == "none":
            train(config, here, mesh)
        else:
            here.finish_check(**check_parity(config, mesh, here.device))


def check_parity(config: Config, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Return the verdict of ``--check parity``. A collective."""
    how = partial(build_model, config, mesh, device), partial(parallelize_model, config, mesh)
    return compare_mesh_training(*how, mesh, device, config.steps, compile=config.compile)


def build_model(config: Config, mesh: DeviceMesh, device: torch.device) -> Network:
    """Build the model, equal on all ranks."""
    torch.manual_seed(0)
    sharded: type[MLPStack | BlockStack]
    sharded = BlockStack if config.network == "transformer" else MLPStack
    model = sharded if config.plan == "fsdp_tp" else LinearChain
    return model(config.dim, batch=config.batch // mesh["data"].size()).to(device)


def parallelize_model(
    config: Config, mesh: DeviceMesh, lab: Network, *, compile: bool = False
) -> nn.Module:
    """Apply the plan's techniques, in torchtitan's order, and return the model."""
    if isinstance(lab, LinearChain):
        model = apply_plain_tensor_parallel(lab, mesh)
        apply_replicate(model, mesh["data"])
        # Last, because the compiler can only fuse DDP's all-reduces if it sees them.
        if compile:
            apply_compile(model)
        return model
    plan = tensor_parallel_plan(lab) if rank.is_replaced(tensor_parallel_plan) else None
    if isinstance(lab, BlockStack):
        apply_block_tensor_parallel(lab, mesh, plan=plan)
    elif config.layers == "yours":
        small_tensor_parallel.share_pairs(lab, mesh["tp"], column_parallel, row_parallel)
    else:
        apply_tensor_parallel(lab, mesh, sequence_parallel=config.seq, plan=plan)
    if config.checkpointing:
        apply_activation_checkpointing(lab, lab.block_types)
    # After checkpointing, so that a compiled block contains its recomputation; before FSDP, whose
    # hooks gather and free around a block and stay outside of the compiled code.
    if compile:
        apply_compile(lab, lab.block_types)
    # With one rank along data FSDP would only wrap.
    if mesh["data"].size() > 1:
        apply_fsdp2(lab, mesh, block_types=lab.block_types)
    if config.layers == "yours" and isinstance(lab, MLPStack):
        return small_tensor_parallel.TensorParallelPairs(lab, mesh["tp"])
    return lab


def train(config: Config, here: rank.Session, mesh: DeviceMesh) -> None:
    """Run forward pass, backward pass and update in every measured step."""
    lab = build_model(config, mesh, here.device)
    # The batch is that of all ranks.
    here.emulate_units(find_blocks(lab, lab.block_types), share=1 / here.world_size)
    model = parallelize_model(config, mesh, lab)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # A memory tracker needs parameters that are leaves, which those of ddp_tp are not.
    tracked = [lab, optimizer] if config.plan == "fsdp_tp" else []
    # Before the steps, because slicing a mesh allocates tensors, which a step's memory would show.
    line = mesh["data"].get_local_rank()
    for index, step in enumerate(here.steps(config.steps, track=tracked, mesh=mesh)):
        with step.untimed():
            inputs = draw_samples(lab, here.device, index, line)
        optimizer.zero_grad()
        with step.span("forward"):
            loss = lab.get_loss(inputs, model(*inputs))
        with step.span("backward"):
            loss.backward()
        with step.span("optimizer"):
            optimizer.step()
        step.record_scalar("loss", loss)


if __name__ == "__main__":
    rank.run_main(main, Config)
