"""Train linear layers in a row with DDP, and let the compiler fuse its all-reduces.

    torchrun --standalone --nproc-per-node 2 -m launch.ddp_compile --fuse concat  # measure
    torchrun --standalone --nproc-per-node 2 -m launch.ddp_compile --check parity --case bf16

The compiler puts the backward pass and its all-reduces into one program: there one can read when it
sends and waits.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit import rank, requirements
from labkit.config import PositiveFloat, PositiveInt
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parallel.buckets import GradientBuckets, assign_buckets
from labkit.parity import draw_samples
from labkit.parity.ddp import build_chain, compare_buckets, compare_techniques
from labkit.session.meter import Step
from labkit.session.traffic import BucketRecorder

PIECE_COUNTS = (1, 64)
"""Into how many messages the gradients' bytes are cut, to tell latency from bytes."""


@dataclass
class Config:
    """How gradients are averaged, and what is looked at."""

    case: Literal["cpu", "cpu_no_sync", "gpu", "bf16", "fp16", "backward_only", "checkpoint"] = (
        "cpu"
    )
    """gpu is cpu on GPUs; no_sync: two batches, sent once; bf16, fp16: what is sent; checkpoint:
    fc1 computed twice.
    """
    mode: Literal["ddp", "replicate", "compiled", "yours"] = "compiled"
    """Who averages: DistributedDataParallel, replicate, the compiler, or data_parallel of use=."""
    fuse: Literal["none", "coalesced", "concat"] = "coalesced"
    """How the compiler makes a bucket: not at all, several tensors in one call, or one flat
    tensor.
    """
    bucket_mb: PositiveFloat = 25.0
    """A bucket is sent once it holds so many MiB."""
    late_waits: bool = True
    """Let the compiled program wait where a gradient is first used, rather than where it was
    sent.
    """
    inductor: bool = True
    """Write programs with inductor; else run the traced passes as they are, where nothing is
    fused.
    """
    dim: PositiveInt = 2000
    """Width of the layers."""
    layers: PositiveInt = 4
    """How many."""
    batch: PositiveInt = 64
    """Samples of a rank in a batch."""
    steps: PositiveInt = 5
    """Timed steps, after two to warm up, in which all is compiled; a check takes two."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    race: bool = False
    """Take every step twice, once by this mode and once by DistributedDataParallel, in turn; time
    both, and no more.
    """
    costs: bool = False
    """Time before every step what it is made of: a backward pass of DDP's in which nothing is sent,
    and the gradients' bytes in one message and in many."""
    check: Literal["none", "parity", "buckets"] = "none"
    """parity: DDP, replicate and both compiled against one device; buckets: predicted, counted,
    read and sent ones.
    """

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        if self.mode == "yours" and (self.case != "cpu" or self.check == "buckets"):
            raise ValueError(
                "mode yours averages float32 after every batch: use case cpu, and check none or"
                " parity"
            )
        if self.race and (
            self.mode not in ("yours", "replicate") or self.case != "cpu" or self.check != "none"
        ):
            raise ValueError(
                "a race is between mode yours or replicate and DDP: use case cpu and check none"
            )
        if self.costs and (
            self.mode != "ddp" or self.case != "cpu" or self.check != "none" or self.race
        ):
            raise ValueError(
                "costs are those of DDP's own reducer: use mode ddp, case cpu, check none and no"
                " race"
            )
        if self.check == "none" and self.mode != "compiled" and self.case == "backward_only":
            raise ValueError(
                f"mode {self.mode} compiles nothing, so not the backward pass alone: use mode"
                " compiled"
            )
        if self.check == "buckets" and (self.fuse == "none" or not self.inductor):
            raise ValueError(
                "check buckets looks for what inductor fuses: use fuse coalesced or concat, and"
                " inductor"
            )
        if self.check == "buckets" and self.case in ("cpu_no_sync", "bf16", "fp16"):
            raise ValueError(
                f"check buckets looks at one float32 backward pass, not at case {self.case}: use"
                " case cpu"
            )
        if (
            self.inductor
            and self.mode != "yours"
            and (self.check != "none" or self.mode == "compiled")
        ):
            requirements.refuse_without_compiler()
        if self.case == "gpu":
            from torch.cuda import (
                device_count,
            )  # takes seconds to import, which other cases need not wait for

            if device_count() < world_size:
                raise ValueError(
                    f"case gpu needs a GPU a rank: {device_count()} for {world_size} ranks; use"
                    " case cpu"
                )


@rank.replaceable
def bounded_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Which gradients travel together, as indices into their sizes in bytes, in the order of the
    backward pass.
    """
    return assign_buckets(sizes, limit)


@rank.replaceable
def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
    """Let every backward pass leave the mean over all ranks in each parameter's ``grad``. The model
    is equal on all.
    """
    device = next(model.parameters()).device.type
    GradientBuckets(
        model.parameters(),
        init_device_mesh(device, (dist.get_world_size(),)),
        bucket_bytes,
        bounded_buckets,
    )


def apply_answer(model: nn.Module, mesh: DeviceMesh, *, bucket_mb: float) -> nn.Module:
    """``data_parallel`` as the other techniques are called."""
    data_parallel(model, round(bucket_mb * 2**20))
    return model


def main(config: Config) -> None:
    """Train and measure, or check."""
    case = ddp.DDP_CASES[config.case]
    sizes = {name: getattr(config, name) for name in ("dim", "batch", "layers")}
    how = {name: getattr(config, name) for name in ("bucket_mb", "fuse", "inductor", "late_waits")}
    with rank.session() as here:
        if config.case == "gpu" and here.device.type == "cpu":
            raise ValueError("case gpu was sent to device cpu: use case cpu")
        mesh = here.mesh(data=here.world_size)
        if config.check != "none":
            if config.mode == "yours":
                how |= {"modes": ("yours",), "yours": apply_answer}
            check = compare_techniques if config.check == "parity" else compare_buckets
            here.finish_check(**check(mesh, here.device, case, **sizes, **how), case=config.case)
        else:
            lab = build_chain(case=case, device=here.device, **sizes)
            with ddp.apply_technique(lab, mesh, config.mode, case, yours=apply_answer, **how) as (
                model,
                programs,
            ):
                if config.race:
                    other = build_chain(case=case, device=here.device, **sizes)
                    rival = ddp.apply_ddp(other, mesh, bucket_mb=config.bucket_mb)
                    return race_techniques(
                        config, here, {config.mode: (lab, model), "ddp": (other, rival)}
                    )
                train(config, here, lab, model, mesh)
            sending = [
                program for program in programs if "_c10d_functional" in program
            ]  # backward passes
            if sending:
                here.save_artifact("code", sending[-1])


def race_techniques(
    config: Config, here: rank.Session, racers: Mapping[str, tuple[LinearChain, Any]]
) -> None:
    """Whole steps of all techniques in turn, each a span of its name, so that what disturbs one
    disturbs all.
    """
    optimizers = {
        name: torch.optim.SGD(lab.parameters(), lr=0.01) for name, (lab, _) in racers.items()
    }
    for index, step in enumerate(here.steps(config.steps, warmup=2)):
        for name in list(racers)[:: -1 if index % 2 else 1]:
            dist.barrier()
            with step.span(name):
                optimizers[name].zero_grad()
                forward_backward(config, here, *racers[name], index, next(here.plain_steps(1)))
                optimizers[name].step()


def train(
    config: Config, here: rank.Session, lab: LinearChain, model: Any, mesh: DeviceMesh
) -> None:
    """Measured steps, and one more to see what travels together."""
    if config.costs:
        other = copy.deepcopy(lab)
        silent = ddp.apply_ddp(other, mesh, bucket_mb=config.bucket_mb)
        silent.register_comm_hook(None, lambda _, bucket: skip_all_reduce(bucket))
    optimizer = torch.optim.SGD(lab.parameters(), lr=0.01)
    units = {name: [layer] for name, layer in lab.named_children() if config.timeline}
    for index, step in enumerate(here.steps(config.steps, warmup=2, units=units)):
        if (
            config.costs and index < 2 + config.steps
        ):  # and not in the step in which messages are counted
            time_backward_and_pieces(here, step, other, silent)
        optimizer.zero_grad()
        step.record_scalar("loss", forward_backward(config, here, lab, model, index, step))
        with step.span("optimizer"):
            optimizer.step()
    if not here.tensors_have_values:
        return  # which gradients a bucket brought is told by their numbers
    lab.zero_grad()
    with BucketRecorder() as wire:
        forward_backward(config, here, lab, model, 0, next(here.plain_steps(1)))
    for index, gradients in enumerate(wire.gradients_by_bucket(lab.named_parameters())):
        here.record_bucket(index, gradients)


def time_backward_and_pieces(here: rank.Session, step: Step, lab: LinearChain, silent: Any) -> None:
    """Spans of what a step is made of: ``alone``, a backward pass of DDP's that sends nothing, and
    ``pieces_n``.
    """
    lab.zero_grad()
    inputs = draw_samples(lab, here.device, 0, here.rank)
    loss = lab.get_loss(inputs, silent(*inputs))
    dist.barrier()
    with step.span("alone"):
        loss.backward()
    row = torch.zeros(sum(parameter.numel() for parameter in lab.parameters()), device=here.device)
    for count in PIECE_COUNTS:
        dist.barrier()
        with step.span(f"pieces_{count}"):
            for handle in [dist.all_reduce(piece, async_op=True) for piece in row.chunk(count)]:
                handle.wait()


def skip_all_reduce(bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook that leaves each rank its own gradients."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def forward_backward(
    config: Config, here: rank.Session, lab: LinearChain, model: Any, index: int, step: Step
) -> Tensor:
    """Forward and backward pass of each batch of a step; the last loss."""
    batches = ddp.DDP_CASES[config.case].batches
    for batch, synced in enumerate(batches):
        inputs = draw_samples(lab, here.device, index, here.rank, batch, len(batches))
        with ddp.gradient_sync(model, synced):
            with step.span("forward"):
                loss = lab.get_loss(inputs, model(*inputs))
            with step.span("backward"):
                loss.backward()
    return loss


if __name__ == "__main__":
    rank.run_main(main, Config)
