"""Simulate all ranks of a mesh in this process, to look at shards without launching anything."""

from collections.abc import Sequence

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, distribute_tensor


def shards_by_rank(
    tensor: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> dict[int, numpy.ndarray]:
    """Return the shard of a CPU tensor on every rank of a mesh; one placement for each axis."""
    from labkit.torch_private import LocalTensor, LocalTensorMode

    if dist.is_initialized():
        fix = "call shards_by_rank from a notebook, not a rank"
        raise RuntimeError(f"this process is in a process group already: {fix}")
    ranks = int(numpy.prod(mesh_shape))
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with LocalTensorMode(ranks):
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            local = distribute_tensor(tensor, mesh, placements).to_local()
            # If no axis shards the tensor, all ranks share one plain tensor.
            if not isinstance(local, LocalTensor):
                return {rank: local.numpy() for rank in range(ranks)}
            return {rank: shard.numpy() for rank, shard in local._local_tensors.items()}
    finally:
        dist.destroy_process_group()
