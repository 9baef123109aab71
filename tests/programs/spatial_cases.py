"""Four ranks that start from different seeds train two steps, and one device does the same, for every way to shard.

Each case records its largest relative error, over all ranks, and how many tensors were compared. Blocks drop up to half
of the samples, so a sample that one strip drops and another keeps shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from labkit import parity, rank
from labkit.models.convnext import ConvNeXt
from labkit.parallel.spatial import Strategy, apply_spatial, own_samples, shard_batch
from labkit.theory import spatial

DEPTHS, SAMPLES = (1, 2), 8


@dataclass
class Case:
    """How a network is sharded, with the lengths of the mesh's axes by name."""

    strategy: Strategy
    axes: dict[str, int]
    tensor_dim: int = 3
    mesh_dim: int | str | None = None


CASES = {
    "local": Case("local", {"space": 4}),
    "local_two_axes": Case("local", {"data": 2, "space": 2}, tensor_dim=2),
    "local_space_first": Case("local", {"space": 2, "data": 2}, mesh_dim="space"),
    "dtensor": Case("dtensor", {"space": 4}, tensor_dim=2),
    "dtensor_two_axes": Case("dtensor", {"data": 2, "space": 2}),
    "dtensor_space_first": Case("dtensor", {"space": 2, "data": 2}, mesh_dim=0),
}


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    with rank.session() as here:
        for name, case in CASES.items():
            found = train(here, case)
            here.record_scalar(f"{name} error", found.largest_error()[0])
            here.record_scalar(f"{name} compared", found.compared)


def made(seed: int) -> ConvNeXt:
    torch.manual_seed(seed)
    model = ConvNeXt(depths=DEPTHS, dims=(8, 8), drop_path_rate=0.5, layer_scale_init_value=1.0).double()
    parity.seed_parameters(model, seed)
    torch.manual_seed(seed)  # the drop-path stream of one device starts here
    return model


def train(here: rank.Session, case: Case) -> parity.Parity:
    mesh = here.mesh(**case.axes)
    reference = made(seed=0)
    stream = torch.get_rng_state()
    model = made(seed=here.rank)
    where = {"tensor_dim": case.tensor_dim, "mesh_dim": case.mesh_dim}
    apply_spatial(model, mesh, strategy=case.strategy, **where)
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(SAMPLES, 3, 96, 96, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    mine, own_labels = shard_batch(images, labels, mesh, **where, stride=spatial.total_stride(DEPTHS))
    found = parity.Parity()
    for step in range(2):
        logits = model(mine)
        cross_entropy(logits, own_labels).backward()
        torch.set_rng_state(stream)
        expected = reference(images)
        stream = torch.get_rng_state()
        cross_entropy(expected, labels).backward()
        found.compare_tensor(f"logits {step}", logits, expected[own_samples(mesh, SAMPLES, case.mesh_dim)])
        found.compare_models(model, reference, "gradient")
        for each in (model, reference):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        found.compare_models(model, reference, "parameter")
    return found


if __name__ == "__main__":
    rank.run_main(main, Config)
