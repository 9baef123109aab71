"""Train a model whose parameters the compiler gathers: SimpleFSDP.

    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --compile
    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --compile --bucket-mb 1
    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --check parity

``fsdp_wrap`` gathers a unit's parameters in a hook. Here reading a parameter gathers it, so a
compiled step holds every collective as an operator, which the compiler may join with others. The
compiler keeps gathered parameters for the backward pass, so a step gathers each one once.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from labkit import parity, rank, requirements
from labkit.config import PositiveFloat, PositiveInt
from labkit.models import catalog
from labkit.models.protocol import LabModel
from labkit.parallel.checkpointing import find_blocks
from labkit.parallel.simple_fsdp import apply_simple_fsdp, bucket_collectives
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training, forward_backward
from labkit.session.meter import Step


@dataclass
class Config:
    """Which model, what the compiler does, and what is measured."""

    model: catalog.ModelName = "mlp_stack"
    """The model to train; hf_bert and hf_t5 need transformers. Not moe."""
    compile: bool = False
    """Compile the model, gathers included, into one graph."""
    bucket_mb: PositiveFloat | None = None
    """Let inductor join neighbouring collectives of the graph up to this many MiB."""
    dim: PositiveInt | None = None
    """Width of mlp_stack, double_linear, unused_linear and skip."""
    layers: PositiveInt | None = None
    """Layers of hf_bert and hf_t5, blocks of mlp_stack."""
    batch: PositiveInt | None = None
    """Samples per rank and step, if the model lets you choose."""
    steps: PositiveInt = 5
    """Timed steps, after two to warm up, in which everything compiles; with a check, compared."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    def validate(self, world_size: int) -> None:
        catalog.check_model(self.model, sizes=self.model_sizes())
        if self.model == "moe":
            fix = "use another model, or the program fsdp_wrap"
            raise ValueError(f"model moe has parameters that differ from rank to rank: {fix}")
        if self.bucket_mb is not None and not self.compile:
            raise ValueError("bucket_mb joins what a compiled graph sends: use compile as well")
        if self.compile:
            requirements.refuse_without_compiler()

    def model_sizes(self) -> dict[str, int]:
        """Return the sizes that were asked for; the model knows the others."""
        asked = {name: getattr(self, name) for name in ("dim", "layers", "batch")}
        return {name: size for name, size in asked.items() if size is not None}


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here, contextlib.ExitStack() as stack:
        lab = build_model(config, here.device)
        here.emulate_units(find_blocks(lab, lab.block_types))
        apply_simple_fsdp(lab, here.mesh(data=here.world_size)["data"])
        if config.compile:
            # A check's one device is not compiled: dropout must draw the same numbers.
            options = {"fallback_random": config.check != "none"}
            lab.compile(fullgraph=True, dynamic=False, options=options)
        if config.bucket_mb is not None:
            stack.enter_context(bucket_collectives(config.bucket_mb))
        if config.check == "none":
            optimizer = torch.optim.Adam(lab.parameters(), lr=1e-3)
            # A memory tracker cannot look into compiled code.
            track: list[Any] = [] if config.compile else [lab, optimizer]
            measured = here.steps(config.steps, warmup=2, track=track)
            train(here, lab, optimizer, measured, keep=False)
        else:
            here.finish_check(**check_parity(config, here, lab))


def build_model(config: Config, device: torch.device, index: int = 0) -> LabModel:
    """Build the model, which is the same on every rank."""
    return catalog.create_model(config.model, seed=0, **config.model_sizes()).to(device)


def train(
    here: rank.Session, lab: LabModel, optimizer: Optimizer, measured: Iterable[Step], *, keep: bool
) -> list[StepOutcome]:
    """Run forward pass, backward pass and update in each step; ``keep`` their outputs."""
    outcomes: list[StepOutcome] = []
    for index, step in enumerate(measured):
        with step.untimed():
            inputs = parity.draw_samples(lab, here.device, index, here.rank)
        optimizer.zero_grad()
        outcome = forward_backward(step, lab, lab, inputs, keep=keep)
        with step.span("optimizer"):
            optimizer.step()
        step.record_scalar("loss", outcome.loss)
        outcomes.append(outcome)
    return outcomes


def check_parity(config: Config, here: rank.Session, lab: LabModel) -> dict[str, Any]:
    """Train, and return the verdict on every step beside one device's. A collective."""
    steps = here.plain_steps(config.steps)
    trained = train(here, lab, parity.make_sgd(lab), steps, keep=True)
    one_device = parity.OneDevice(partial(build_model, config, here.device), here.world_size)
    return compare_fsdp_training(one_device, lab, trained, rank=here.rank, steps=config.steps)


if __name__ == "__main__":
    rank.run_main(main, Config)
