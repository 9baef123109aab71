"""Measure how many bytes leave each host in a training step, under FSDP and under HSDP.

    GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 2 … launch/cluster/traffic.py

It needs PyTorch alone, and Linux, whose network cards count the bytes that they send.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM = int(os.environ.get("DIM", "512"))
CARD = os.environ.get("GLOO_SOCKET_IFNAME", "eth0")


def shard_hybrid(model: nn.Sequential, hosts: int, ranks: int) -> None:
    """Shard a model over the ranks of a host, with a copy on each host."""
    mesh = init_device_mesh("cpu", (hosts, ranks), mesh_dim_names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_over_all(model: nn.Sequential) -> None:
    """Shard a model over all ranks of all hosts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sent_bytes() -> int:
    """Return the bytes that this host's network card has sent since it was made."""
    rows = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    counted = {name.strip(): numbers.split() for name, numbers in rows}
    return int(counted[CARD][8])


def measure(way: str) -> None:
    """Print what leaves this host in a step, the second one: in the first, connections are made."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = dist.get_world_size() // ranks
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(4)))
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    shard_hybrid(model, hosts, ranks) if way == "hsdp" else shard_over_all(model)
    for _ in range(2):
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        model(torch.randn(8, DIM)).square().mean().backward()
        dist.barrier()
        sent = sent_bytes() - before
    if os.environ["LOCAL_RANK"] == "0":
        host, times = os.environ["GROUP_RANK"], sent / model_bytes
        said = f"host {host}: {way} sent {sent:,} bytes = {times:.2f} times the model's"
        print(f"{said}\n", end="", flush=True)


def main() -> None:
    """Measure a step of each way."""
    dist.init_process_group("gloo")
    measure("fsdp")
    measure("hsdp")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
