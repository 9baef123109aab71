"""Train a layer with clipped gradients on any number of ranks: plain PyTorch, without labkit."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def train(model: nn.Linear, batches: list[Tensor]) -> list[float]:
    """Take a step for each batch, on gradients of all ranks; return this rank's losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        norm = model.weight.grad.norm()
        if norm > 1:
            model.weight.grad.div_(norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(nn.Linear(64, 64, bias=False), [torch.randn(8, 64) for _ in range(3)])
    dist.destroy_process_group()
