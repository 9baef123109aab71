"""Four ranks train every plan of launch/two_dim beside one device; rank 0 prints one JSON object, verdicts by case.

All in one process group: torch keeps meshes of an earlier group in its caches, so DTensors want fresh processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from labkit import rank
from labkit.parallel.tensor_parallel import CHAIN_PAIRS
from labkit.parity import two_dim as parity
from launch import two_dim

DIM = 8
CPU = torch.device("cpu")
CHAIN = two_dim.Config(plan="ddp_tp", dim=DIM, steps=1, compile=False)
LOGGER = logging.getLogger("torch.distributed.tensor")
EAGER: dict[str, dict[str, Any]] = {
    "fsdp_tp": {},
    "fsdp_tp seq": {"seq": True},
    "tp alone": {"tp": 4},
    "tp alone seq": {"tp": 4, "seq": True},
    "fsdp alone": {"tp": 1},
    "own layers": {"layers": "yours"},
    "own layers, tp alone": {"layers": "yours", "tp": 4},
    "transformer": {"network": "transformer", "dim": 16},
    "transformer, tp alone": {"network": "transformer", "dim": 32, "tp": 4},
    "ddp_tp": {"plan": "ddp_tp"},
    "ddp_tp, a width that data does not divide": {"plan": "ddp_tp", "dim": 6},
    "chain, tp alone": {"plan": "ddp_tp", "tp": 4},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled fsdp_tp": {},
    "compiled fsdp_tp seq, checkpointing": {"seq": True, "checkpointing": True, "dim": 16},
    "compiled ddp_tp": {"plan": "ddp_tp"},
}


@dataclass
class Config:
    compile: bool = False
    """The compiled cases instead of the eager ones."""


def main(config: Config) -> None:
    with rank.session() as here:
        meshes = {tp: here.mesh(data=4 // tp, tp=tp) for tp in (1, 2, 4)}
        found: dict[str, Any] = {"levels": [LOGGER.level]}
        for name, case in (COMPILED if config.compile else EAGER).items():
            chosen = two_dim.Config(**case, compile=config.compile, steps=2)
            found[name] = two_dim.check_parity(chosen, meshes[chosen.tp], CPU)
        others = (not_averaged, as_torch_does_it, kept_with_ddp)
        for each in (nothing_compiled, backward_not_compiled) if config.compile else others:
            found[each.__name__.replace("_", " ")] = each(meshes[2])
        found["levels"].append(LOGGER.level)
        here.print_on_rank_0(json.dumps(found))


def chain(mesh: DeviceMesh) -> Any:
    return two_dim.build_model(CHAIN, mesh, CPU)


def nothing_compiled(mesh: DeviceMesh) -> dict[str, Any]:
    """The verdict on a compiled version that is none, after others that were compiled in this process."""
    with patch.object(two_dim, "apply_compile"):
        return two_dim.check_parity(two_dim.Config(steps=1), mesh, CPU)


def backward_not_compiled(mesh: DeviceMesh) -> dict[str, Any]:
    """The same for a chain compiled without its backward pass; and whose reducers are Python's, eager's first."""
    made = []

    def apply(lab: Any, **how: bool) -> Any:
        made.append(two_dim.parallelize_model(CHAIN, mesh, lab, **how))
        return made[-1]

    with patch.object(parity, "compile_backward", contextlib.nullcontext):
        verdict = parity.compare_mesh_training(lambda: chain(mesh), apply, mesh, CPU, 1, compile=True)
    return verdict | {"python_reducers": [replicate.state(model)._ddp._use_python_reducer for model in made]}


def not_averaged(mesh: DeviceMesh) -> dict[str, Any]:
    """The verdict on a chain without DDP, whose gradients stay this line's own."""
    with patch.object(two_dim, "apply_replicate"):
        return two_dim.check_parity(CHAIN, mesh, CPU)


def as_torch_does_it(mesh: DeviceMesh) -> list[int]:
    """How many parameters a replicated tensor-parallel chain has, before and after a forward pass."""
    model = chain(mesh)
    replicate(parallelize_module(model, mesh["tp"], CHAIN_PAIRS), device_mesh=mesh["data"])
    before = len(list(model.parameters()))
    model(torch.ones(2, DIM))
    return [before, len(list(model.parameters()))]


def kept_with_ddp(mesh: DeviceMesh) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and Adam's state after a step of ddp_tp, by the names of theory."""
    model = two_dim.parallelize_model(CHAIN, mesh, chain(mesh))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    tensors: dict[str, list[Any]] = {
        "parameter": list(model.parameters()),
        "gradient": [parameter.grad for parameter in model.parameters()],
        "optstate": [each for state in optimizer.state.values() for each in state.values()],
    }
    return {f"end_{name}_bytes": sum(each.nbytes for each in held) for name, held in tensors.items()}


if __name__ == "__main__":
    rank.run_main(main, Config)
