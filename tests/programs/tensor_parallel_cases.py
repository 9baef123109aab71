"""Four ranks, 2 x 2, train two steps of an MLP stack whose matrices they share, and one device does the same.

Each case records its largest relative error, over all ranks, and how many tensors were compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from labkit import parity, rank
from labkit.models.mlp import MLPStack
from labkit.parallel.checkpointing import apply_activation_checkpointing
from labkit.parallel.fsdp import apply_fsdp2
from labkit.parallel.tensor_parallel import apply_tensor_parallel
from labkit.requirements import torch_feature_problem


@dataclass
class Case:
    sequence_parallel: bool
    norm: bool = False
    sequence: int = 8
    use_checkpointing: bool = False
    reshard_after_forward: bool = True


CASES = {
    "tensor": Case(sequence_parallel=False),
    "tensor_norm": Case(sequence_parallel=False, norm=True, reshard_after_forward=False),
    "sequence": Case(sequence_parallel=True),
    "sequence_norm": Case(sequence_parallel=True, norm=True, reshard_after_forward=False),
    "sequence_uneven": Case(sequence_parallel=True, norm=True, sequence=7),
    "tensor_checkpointing": Case(sequence_parallel=False, use_checkpointing=True),
    "sequence_checkpointing": Case(sequence_parallel=True, norm=True, use_checkpointing=True),
}
MISSING = {"sequence_uneven": torch_feature_problem()}
"""Why a case cannot run with the installed torch, "" where it can."""


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    with rank.session() as here:
        mesh = here.mesh(data=2, tp=2)
        for name, case in CASES.items():
            if MISSING.get(name):
                continue
            found = train(mesh, case)
            here.record_scalar(f"{name} error", found.largest_error()[0])
            here.record_scalar(f"{name} compared", found.compared)


def train(mesh: DeviceMesh, case: Case) -> parity.Parity:
    torch.manual_seed(0)
    reference = MLPStack(8, with_layer_norm=case.norm).double()
    model = parity.seed_and_copy(reference, seed=1)
    apply_tensor_parallel(model, mesh, sequence_parallel=case.sequence_parallel)
    if case.use_checkpointing:
        apply_activation_checkpointing(model, model.block_types)
    apply_fsdp2(model, mesh, block_types=model.block_types, reshard_after_forward=case.reshard_after_forward)
    samples = torch.randn(4, case.sequence, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    line = mesh["data"].get_local_rank()
    mine = slice(2 * line, 2 * line + 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    found = parity.Parity()
    for step in range(2):
        output, expected = model(samples[mine]), reference(samples)
        for each, inputs, result in ((model, samples[mine], output), (reference, samples, expected)):
            each.run_backward(each.get_loss((inputs,), result))
        found.compare_tensor(f"output {step}", output, expected[mine])
        found.compare_models(model, reference, "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.compare_models(model, reference, "parameter")
    return found


if __name__ == "__main__":
    rank.run_main(main, Config)
