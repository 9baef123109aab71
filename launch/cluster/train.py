"""Train a small network on any number of ranks and hosts, and go on where the last run ended.

    torchrun --standalone --nproc-per-node 4 launch/cluster/train.py

It needs PyTorch alone. Ranks save after every $EVERY steps into the folder $SAVES, which all hosts
see. A file called "stop" in that folder asks them to save and end: launch/cluster/general.sbatch
makes it before Slurm ends the job.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SAMPLES = 256  # in a step, whatever the number of ranks, which has to divide it
STEPS = int(os.environ.get("STEPS", "20"))
EVERY = int(os.environ.get("EVERY", "1"))
STEP_S = float(os.environ.get("STEP_S", "0"))  # a step of a larger network would take this long


def newest_complete(folder: Path) -> Path | None:
    """Return the newest save that was written to its end, or None; rank 0 looks for all."""
    complete = [path for path in folder.glob("step_*") if (path / ".metadata").exists()]
    newest = [max(complete, key=lambda path: int(path.name.split("_")[1]), default=None)]
    dist.broadcast_object_list(newest)  # hosts may see a new file at different moments
    return newest[0]


def all_stop(asked: bool) -> bool:
    """Return on all ranks whether any of them was asked to stop."""
    anyone = torch.tensor(float(asked))
    dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
    return bool(anyone)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    one_step: Callable[[int], bool],
    folder: Path,
    steps: int,
    every: int,
) -> None:
    """Train the steps that the newest complete save has not, and save after every few of them.

    Args:
        model: sharded by FSDP.
        optimizer: of its parameters.
        one_step: trains a step, given its number, and returns whether all ranks have to stop.
        folder: of the saves, which are called step_ and the number of steps done.
        steps: their number in the whole training.
        every: so many steps lie between two saves.
    """
    first = 0
    if newest := newest_complete(folder):
        weights, updates = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": updates, "step": 0}
        dcp.load(state, checkpoint_id=newest)  # cuts each tensor for as many ranks as there are now
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        first = state["step"]
    for step in range(first, steps):
        stop = one_step(step)
        if stop or (step + 1) % every == 0:
            weights, updates = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": updates, "step": step + 1}
            dcp.save(state, checkpoint_id=folder / f"step_{step + 1:08d}")
        if stop:
            return


def main() -> None:
    """Build the network, and train it from the newest complete save on."""
    dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(LOCAL_RANK)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))  # "cuda" on GPUs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = Path(os.environ.get("SAVES", "saves"))

    def one_step(step: int) -> bool:
        samples = torch.Generator().manual_seed(step)  # those of this step, whoever computes them
        x = torch.randn(SAMPLES, 16, generator=samples).chunk(ranks)[rank]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} on {ranks} ranks: loss {mean.item():.7f}", flush=True)
        return all_stop((folder / "stop").exists())

    train(model, optimizer, one_step, folder, STEPS, EVERY)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
