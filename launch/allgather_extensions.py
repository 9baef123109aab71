"""Train with parameters that decide what FSDP's all-gather sends.

    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --extension int8       # a photo's tiles
    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --check wire           # bytes of each
    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --check parity         # equal to plain?

The optimizer's shards stay float32. Only what a unit gathers before it computes is rounded, or sent twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from labkit import photo, rank
from labkit.meter import CommunicationCounter
from labkit.models.mlp import MLP
from labkit.parallel.extensions import apply_extension
from labkit.parity.extensions import of_extension, of_meta_device
from labkit.tensors import gathered_error, plain_tensors, refuse_leak
from labkit.theory import extensions as theory

TILE, CLASSES = 16, 10


@dataclass
class Config:
    """What is sent, and what is looked at."""

    extension: Literal["two_tensor", "fp32", "bf16", "float8", "int8"] = "two_tensor"
    """What a parameter sends: itself twice, or its numbers in this type."""
    check: Literal["none", "parity", "meta", "wire"] = "none"
    """parity: equal to plain training, exactly; meta: no parameter left unset; wire: the bytes of all extensions."""
    dim: int = 128
    """Width of the network."""
    batch: int = 64
    """Tiles of a rank in a step."""
    steps: int = 10
    """Timed steps, after one to warm up; with parity or meta, compared or trained steps."""
    reshard_after_forward: bool = True
    """Free a unit's parameters after its forward pass and gather them again; parity does both."""

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        if world_size < 2:
            raise ValueError("an all-gather extension needs at least 2 ranks: with 1 FSDP2 gathers nothing")
        if self.check == "parity" and self.extension not in ("two_tensor", "fp32"):
            raise ValueError(f"extension {self.extension} rounds: only two_tensor and fp32 can be equal to plain")
        if self.check == "wire" and self.dim < 128:
            raise ValueError(f"dim {self.dim}: a row of fewer than 128 numbers is too short to make up for its scale")


def main(config: Config) -> None:
    """Train and measure, or check."""
    with rank.session() as here:
        mesh = here.mesh(data=here.world_size)
        if config.check == "none":
            train(config, here, mesh)
        elif config.check == "wire":
            check_wire(config, here, mesh)
        else:
            check = {"parity": of_extension, "meta": of_meta_device}[config.check]
            here.verdict(**check(mesh, here.device, config.extension, config.steps))


def build(config: Config, here: rank.Here, mesh: DeviceMesh, extension: str) -> nn.Sequential:
    """A network that says from which region of the photo a tile was cut; starts equal whatever the extension."""
    torch.manual_seed(0)
    first, last = nn.Linear(3 * TILE * TILE, config.dim, bias=False), nn.Linear(config.dim, CLASSES, bias=False)
    model = nn.Sequential(nn.Flatten(), first, MLP(config.dim, bias=False), MLP(config.dim, bias=False), last)
    reshard = config.reshard_after_forward
    return apply_extension(model.to(here.device), mesh, extension, reshard_after_forward=reshard)


def backward(config: Config, here: rank.Here, model: nn.Module, index: int) -> Tensor:
    """Forward and backward pass on this rank's tiles of one step; the loss."""
    images, labels = photo.batch("photo", config.batch, TILE, TILE, CLASSES, seed=1000 * index + here.rank)
    loss = cross_entropy(model(images.to(here.device)), labels.to(here.device))
    loss.backward()
    return plain_tensors(loss.detach())[0]


def train(config: Config, here: rank.Here, mesh: DeviceMesh) -> None:
    """Train on the photo; record losses, traffic, and the error of what was gathered."""
    model = build(config, here, mesh, config.extension)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    for index, step in enumerate(here.steps(config.steps)):
        optimizer.zero_grad()
        with step.span("forward_backward"):
            loss = backward(config, here, model, index)
        with step.span("optimizer"):
            optimizer.step()
        step.scalar("loss", loss)
    here.scalar("weight_error", gathered_error(model))
    refuse_leak(model)


def check_wire(config: Config, here: rank.Here, mesh: DeviceMesh) -> None:
    """Count what each extension gathers in a step, and hold it against theory."""
    measured, predicted = {}, {}
    for name in theory.BYTES:
        model = build(config, here, mesh, name)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        predicted[name] = theory.step_bytes(shapes, here.world_size, name, reshard=config.reshard_after_forward)
        with CommunicationCounter() as counter:
            backward(config, here, model, 0)
        measured[name] = counter.bytes["all_gather"]
    here.verdict(check="wire", **measured, ok=measured == predicted)


if __name__ == "__main__":
    rank.start(main, Config)
