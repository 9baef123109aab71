"""An all-reduce in a ring, of sends and receives alone, one step after another, to look at.

Each rank sends to the next and receives from the one before. A tensor is cut into as many parts as
there are ranks. In ranks - 1 steps the parts go around and are added up, a reduce-scatter; in as
many more the sums go around, an all-gather. Source: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce_steps(tensor: Tensor) -> Iterator[Tensor]:
    """What this rank holds after each of the 2 (ranks - 1) steps; the last is the sum. A
    collective.

    Args:
        tensor: a vector of the same length on every rank; it is not changed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        requests = [
            dist.isend(parts[leaves], (rank + 1) % ranks),
            dist.irecv(arrived, (rank - 1) % ranks),
        ]
        for request in requests:
            assert request is not None, "every rank of the world is in its own group"
            request.wait()
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
        yield torch.cat(parts)
