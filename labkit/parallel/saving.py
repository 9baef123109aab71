"""Save a training run whose state is sharded, and go on with it, on another number of ranks if need
be.

A folder holds a file for each rank, written and read side by side, in which every tensor knows its
whole shape and
place: torch.distributed.checkpoint cuts them anew for whoever loads. One plain file (``.pt``) holds
    the same state
whole: rank 0 gathers and writes it, so it must fit into one host's memory, and ``torch.load`` alone
    can read it.

    {"model": {name: tensor}, "optimizer": {"state": …, "param_groups": …}, "step": 3}

``Checkpoints`` saves after every step, for a training that may be killed at any moment.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from labkit.parallel.safe_checkpoint import SafeCheckpointReader, SafeLoadPlanner

PLAIN_FILE_SUFFIX = ".pt"
"""How the name of a plain file ends; any other name is a folder's."""
CHECKPOINTS_TO_KEEP = 2
"""So many checkpoints stay: the newest, and one for whoever distrusts it."""


def save_training(path: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save parameters, buffers, the optimizer's state and how many steps were trained. A
    collective.

    Args:
        path: a folder, or a file that ends in ``.pt``; nothing may be there.
        model: plain, FSDP1's or FSDP2's; without modules that differ from rank to rank.
        optimizer: of its parameters.
        step: steps trained so far.
    """
    plain = path.suffix == PLAIN_FILE_SUFFIX
    on_gpu = next(model.parameters()).device.type == "cuda"
    options = StateDictOptions(
        full_state_dict=plain, cpu_offload=plain and on_gpu
    )  # FSDP1 on a CPU crashes with it
    weights, updates = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optimizer": updates, "step": step}
    if not plain:
        state_dict_saver.save(state, checkpoint_id=path)
    elif dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load_training(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Put a saved state into a model and its optimizer, whoever saved it. A collective.

    Args:
        path: what ``save_training`` wrote.
        model: of the same kind and sizes; sharded over any ranks, or not at all.
        optimizer: of the same kind, of the model's parameters.

    Returns:
        How many steps were trained.

    Raises:
        RuntimeError or torch.distributed.checkpoint.CheckpointException: the saved tensors have
        other names or shapes.
    """
    if path.suffix != PLAIN_FILE_SUFFIX:
        weights, updates = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": updates, "step": 0}
        state_dict_loader.load(
            state, storage_reader=SafeCheckpointReader(path), planner=SafeLoadPlanner()
        )
        options = StateDictOptions()
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    return int(state["step"])


class CheckpointFolder:
    """A folder of saves, one a step, that all ranks see. Training goes on from the newest that is
    complete.

    A save takes its name in one step, once every rank has written its part: one that was cut off is
    never taken. Making this is a collective, as its functions are.

    Args:
        folder: is made if it is not there.

    Raises:
        ValueError: a rank does not see the folder that rank 0 sees.
    """

    def __init__(self, folder: Path):
        self._folder, self._is_first = folder, dist.get_rank() == 0
        word: list[Any] = [None, None]
        if self._is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".step_*"):  # of a run that was killed
                shutil.rmtree(leftover)
            word = [
                f".seen_{uuid.uuid4().hex}",
                max((path.name for path in folder.glob("step_*")), default=None),
            ]
            (folder / word[0]).touch()
        dist.broadcast_object_list(word)
        mark, self._newest = word
        sees: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sees, (folder / mark).exists())
        if self._is_first:
            (folder / mark).unlink()
        if blind := [rank for rank, does in enumerate(sees) if not does]:
            raise ValueError(
                f"ranks {blind} do not see rank 0's folder {folder}: take one on a disk that all"
                " share"
            )

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Put the newest save into a model and its optimizer; returns how many steps were trained,
        0 without a save.
        """
        return load_training(self._folder / self._newest, model, optimizer) if self._newest else 0

    def save(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Save a training after so many steps."""
        name = f"step_{step:08d}"
        save_training(
            self._folder / f".{name}", model, optimizer, step
        )  # none leaves it before all have written
        if self._is_first:
            (self._folder / f".{name}").rename(self._folder / name)
            for old in sorted(self._folder.glob("step_*"))[:-CHECKPOINTS_TO_KEEP]:
                shutil.rmtree(old.rename(self._folder / f".{old.name}"))
