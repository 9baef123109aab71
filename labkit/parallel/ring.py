"""An all-reduce in a ring, built from sends and receives, one visible step at a time.

Each rank sends to the next rank and receives from the one before. A tensor is cut into one part per
rank. During the first ranks - 1 steps the parts go around and are added up (reduce-scatter); during
another ranks - 1 steps the sums go around (all-gather). Source: Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(mine: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the sum over all ranks of this rank's vector. A collective."""
    *_, total = [mine.clone(), *ring_all_reduce_steps(mine)]
    return total


def ring_all_reduce_steps(tensor: Tensor) -> Iterator[Tensor]:
    """Yield this rank's vector after each of the 2 (ranks - 1) steps; the last one is the sum.

    A collective; the vectors are equally long, and stay as they are.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        # In the second half, finished sums replace the part.
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
        yield torch.cat(parts)
