"""Four ranks train every plan of launch/two_dim beside one device; rank 0 prints one JSON object, verdicts by case.

All in one process group: torch keeps meshes of an earlier group in its caches, so DTensors want fresh processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from labkit import rank
from labkit.models.chain import LinearChain
from labkit.parallel.tensor import PlainParameters
from labkit.parity.two_dim import of_two_dims
from launch import two_dim

PAIRS = {
    "fc1": ColwiseParallel(), "fc2": RowwiseParallel(), "fc3": ColwiseParallel(), "fc4": RowwiseParallel(),
}  # fmt: skip
EAGER: dict[str, dict[str, Any]] = {
    "fsdp_tp": {},
    "fsdp_tp seq": {"seq": True},
    "tp alone": {"tp": 4},
    "tp alone seq": {"tp": 4, "seq": True},
    "fsdp alone": {"tp": 1},
    "ddp_tp": {"plan": "ddp_tp"},
    "chain, tp alone": {"plan": "ddp_tp", "tp": 4},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled fsdp_tp": {},
    "compiled fsdp_tp seq": {"seq": True},
    "compiled ddp_tp": {"plan": "ddp_tp"},
}


@dataclass
class Config:
    compile: bool = False
    """The compiled cases instead of the eager ones."""


def main(config: Config) -> None:
    with rank.session() as here:
        meshes = {tp: here.mesh(dp=4 // tp, tp=tp) for tp in (1, 2, 4)}
        found: dict[str, Any] = {}
        for name, case in (COMPILED if config.compile else EAGER).items():
            chosen = two_dim.Config(**case, compile=config.compile, steps=2)
            found[name] = two_dim.compare(chosen, meshes[chosen.tp], here.device)
        if not config.compile:
            found["not averaged"] = not_averaged(meshes[2], here.device)
            found["as torch does it"] = as_torch_does_it(meshes[2])
        here.print(json.dumps(found))


def not_averaged(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """The verdict on a chain whose gradients stay this line's own."""
    line = mesh["tp"]
    return of_two_dims(
        lambda: two_dim.build(two_dim.Config(plan="ddp_tp"), mesh, device),
        lambda lab: PlainParameters(parallelize_module(lab, line, PAIRS), line),
        mesh, device, 1, compile=False,
    )  # fmt: skip


def as_torch_does_it(mesh: DeviceMesh) -> list[int]:
    """How many parameters a replicated tensor-parallel chain has, before and after a forward pass."""
    model = LinearChain(8)
    replicate(parallelize_module(model, mesh["tp"], PAIRS), device_mesh=mesh["dp"])
    before = len(list(model.parameters()))
    model(torch.ones(2, 8))
    return [before, len(list(model.parameters()))]


if __name__ == "__main__":
    rank.start(main, Config)
