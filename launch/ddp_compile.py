"""Train linear layers in a row with DDP, and let the compiler fuse its all-reduces.

    torchrun --standalone --nproc-per-node 2 -m launch.ddp_compile --fuse concat
    torchrun --standalone --nproc-per-node 2 -m launch.ddp_compile --check parity --case bf16

The compiler puts the backward pass and its all-reduces into one program, in which one can read
where it sends and where it waits.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD
from torch.profiler import record_function

from labkit import rank, requirements
from labkit.config import PositiveFloat, PositiveInt
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parallel.buckets import GradientBuckets, assign_buckets
from labkit.parity import draw_samples
from labkit.parity.ddp import build_chain, compare_buckets, compare_techniques
from labkit.session.meter import Step
from labkit.session.timeline import BACKWARD_MARK, FORWARD_MARK
from labkit.session.traffic import BucketRecorder

CaseName = Literal["cpu", "cpu_no_sync", "gpu", "bf16", "fp16", "backward_only", "checkpoint"]


@dataclass
class Config:
    """How gradients are averaged, and what is measured or checked."""

    case: CaseName = "cpu"
    """gpu is cpu on GPUs; no_sync: two batches, averaged once; bf16, fp16: dtype of sent gradients;
    checkpoint: fc1 is computed twice.
    """
    mode: Literal["ddp", "replicate", "compiled", "yours"] = "compiled"
    """Who averages: DistributedDataParallel, replicate, the compiler, or data_parallel of use=."""
    fuse: Literal["none", "coalesced", "concat"] = "coalesced"
    """A fused bucket: none, several tensors in one call (coalesced), or a flat tensor (concat)."""
    graph: Literal["none", "split", "whole"] = "none"
    """Compile inside DDP: none, cut where DDP's buckets end as PyTorch does, or one whole graph."""
    bucket_mb: PositiveFloat = 25.0
    """A bucket is sent once it holds this many MiB."""
    late_waits: bool = True
    """Let the compiled program wait where a gradient is first used, not where it was sent."""
    inductor: bool = True
    """Generate code with inductor; otherwise run the traced passes, with nothing fused."""
    dim: PositiveInt = 2000
    """Width of the layers."""
    layers: PositiveInt = 4
    """Number of layers."""
    batch: PositiveInt = 64
    """Samples per rank in a batch."""
    steps: PositiveInt = 5
    """Timed steps, after two to warm up, in which everything compiles; a check takes two."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    sizes_mb: tuple[PositiveFloat, ...] = ()
    """Run every step once with each of these bucket sizes, in turn, and only time them."""
    check: Literal["none", "parity", "buckets"] = "none"
    """parity: compare DDP and replicate, eager and compiled, with one device; buckets: compare the
    predicted, counted and sent buckets with those in the code.
    """

    def validate(self, world_size: int) -> None:
        case, mode, buckets = self.case, self.mode, self.check == "buckets"
        plain = case == "cpu" and self.check == "none"
        if mode == "yours" and (case != "cpu" or buckets):
            rule = "mode yours averages float32 after every batch"
            raise ValueError(f"{rule}: use case cpu, and check none or parity")
        if self.sizes_mb and not (plain and mode in ("yours", "ddp")):
            rule = "sizes_mb compares times of mode yours or ddp"
            raise ValueError(f"{rule}: use case cpu and check none")
        if self.graph != "none" and not (plain and mode == "ddp" and not self.sizes_mb):
            rule = "graph compiles the module inside DDP"
            raise ValueError(f"{rule}: use mode ddp, case cpu, check none, and no sizes_mb")
        if self.check == "none" and mode != "compiled" and case == "backward_only":
            raise ValueError(f"mode {mode} compiles nothing, no backward pass: use mode compiled")
        if buckets and (self.fuse == "none" or not self.inductor):
            rule = "check buckets looks for what inductor fuses"
            raise ValueError(f"{rule}: use fuse coalesced or concat, and inductor")
        if buckets and case in ("cpu_no_sync", "bf16", "fp16"):
            rule = f"check buckets looks at one float32 backward pass, not at case {case}"
            raise ValueError(f"{rule}: use case cpu")
        compiles = mode == "compiled" or (self.check != "none" and mode != "yours")
        if self.inductor and compiles:
            requirements.refuse_without_compiler()


@rank.replaceable
def bounded_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Return the buckets, as indices into gradient sizes (bytes) in order of the backward pass."""
    return assign_buckets(sizes, limit)


@rank.replaceable
def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
    """Make every backward pass leave the mean over all ranks in each parameter's ``grad``."""
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    GradientBuckets(model.parameters(), mesh, bucket_bytes, bounded_buckets)


def apply_answer(model: nn.Module, mesh: DeviceMesh, *, bucket_mb: float) -> nn.Module:
    """Call ``data_parallel`` with the arguments of the other techniques."""
    data_parallel(model, round(bucket_mb * 2**20))
    return model


def main(config: Config) -> None:
    """Train and measure, or check."""
    case = ddp.DDP_CASES[config.case]
    how = {name: getattr(config, name) for name in ("bucket_mb", "fuse", "inductor", "late_waits")}
    with rank.session() as here:
        if config.case == "gpu" and here.device.type == "cpu":
            raise ValueError("case gpu was sent to device cpu: use case cpu")
        mesh = here.mesh(data=here.world_size)
        build = partial(build_chain, config.dim, case, here.device, config.batch, config.layers)
        if config.check != "none":
            if config.mode == "yours":
                how |= {"modes": ("yours",), "yours": apply_answer}
            check = compare_techniques if config.check == "parity" else compare_buckets
            here.finish_check(**check(build, mesh, case, **how), case=config.case)
            return
        if config.sizes_mb:
            time_sizes(config, here, build, mesh)
            return
        lab = build()
        here.emulate_units(lab.children())
        technique = ddp.apply_technique(lab, mesh, config.mode, case, yours=apply_answer, **how)
        with technique as (model, programs), contextlib.ExitStack() as stack:
            if config.graph != "none":
                inside = ddp.compile_inside_ddp(lab, split=config.graph == "split")
                graphs = stack.enter_context(inside)
            train(config, here, lab, model)
            if config.graph != "none":
                here.record_scalar("graphs", len(graphs))
        # Only the programs of backward passes contain collectives.
        sending = [program for program in programs if "_c10d_functional" in program]
        if sending:
            here.save_artifact("code", sending[-1])


def time_sizes(
    config: Config, here: rank.Session, build: Callable[[], LinearChain], mesh: DeviceMesh
) -> None:
    """Run whole steps with each size of bucket, in spans such as "0.5 MiB"."""
    apply = apply_answer if config.mode == "yours" else ddp.apply_ddp
    nets: dict[str, tuple[LinearChain, Any, SGD]] = {}
    for size_mb in config.sizes_mb:
        lab = build()
        here.emulate_units(lab.children())
        model = apply(lab, mesh, bucket_mb=size_mb)
        nets[f"{size_mb:g} MiB"] = lab, model, SGD(lab.parameters(), lr=0.01)
    for index, step in enumerate(here.steps(config.steps)):
        # The last step counts messages, and would mix the sizes.
        if index > config.steps:
            continue
        # In turn within each step, so that a disturbance hits all, and in alternating order.
        names = list(nets)[:: -1 if index % 2 else 1]
        # DDP learns the order of gradients in the step that is not timed; yours has nothing to
        # learn, and one of its nets warms up this process.
        if index == 0 and config.mode == "yours":
            names = names[-1:]
        for name in names:
            lab, model, optimizer = nets[name]
            dist.barrier()
            next(here.plain_steps(1))  # starts the clock of an emulated device
            with step.span(name):
                optimizer.zero_grad()
                forward_backward(config, here, lab, model, index, step)
                optimizer.step()


def train(config: Config, here: rank.Session, lab: LinearChain, model: Any) -> None:
    """Train in every measured step; then run one more to see which gradients share a bucket."""
    optimizer = SGD(lab.parameters(), lr=0.01)
    # A mark on a layer of a compiled graph would compile it again, within the profiled step.
    own = config.graph == "none"
    units = {name: [layer] * own for name, layer in lab.named_children() if config.timeline}
    for index, step in enumerate(here.steps(config.steps, warmup=2, units=units)):
        optimizer.zero_grad()
        step.record_scalar("loss", forward_backward(config, here, lab, model, index, step))
        with step.span("optimizer"):
            optimizer.step()
    # The recorder identifies the gradients of a bucket by their values.
    if not here.tensors_have_values:
        return
    lab.zero_grad()
    with BucketRecorder() as wire:
        forward_backward(config, here, lab, model, 0, next(here.plain_steps(1)))
    for index, gradients in enumerate(wire.gradients_by_bucket(lab.named_parameters())):
        here.record_bucket(index, gradients)


def forward_backward(
    config: Config, here: rank.Session, lab: LinearChain, model: Any, index: int, step: Step
) -> Tensor:
    """Run forward and backward pass of each batch of a step; return the last loss."""
    batches = ddp.DDP_CASES[config.case].batches
    # Of what is compiled inside DDP a profile knows no layers, so its programs get names.
    marked = config.timeline and config.graph != "none"
    for batch, synced in enumerate(batches):
        with step.untimed():
            inputs = draw_samples(lab, here.device, index, here.rank, batch, len(batches))
        with ddp.gradient_sync(model, synced):
            with step.span("forward"), contextlib.ExitStack() as named:
                if marked:
                    named.enter_context(record_function(f"{FORWARD_MARK} (forward)"))
                loss = lab.get_loss(inputs, model(*inputs))
            if marked:
                mark_programs(loss)
            with step.span("backward"):
                loss.backward()
    return loss


def mark_programs(loss: Tensor) -> None:
    """Mark in a profile where each compiled backward program begins, as program.1 and so on."""

    def mark(number: int) -> None:
        with record_function(f"{BACKWARD_MARK} (program.{number})"):
            pass

    for number, program in enumerate(ddp.backward_programs(loss), 1):
        program.register_prehook(lambda _, number=number: mark(number))


if __name__ == "__main__":
    rank.run_main(main, Config)
