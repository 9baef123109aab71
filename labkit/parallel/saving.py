"""Save a sharded training run, and resume it, on another number of ranks if need be.

A folder holds one file per rank, written and read in parallel. Every tensor in it knows its whole
shape and its place, so torch.distributed.checkpoint can cut it for any number of ranks. A plain
file (``.pt``) holds the same state unsharded: rank 0 gathers and writes it, so it must fit into one
host's memory, and ``torch.load`` can read it.

    {"model": {name: tensor}, "optimizer": {"state": …, "param_groups": …}, "step": 3}

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from labkit.errors import LabError
from labkit.parallel.safe_checkpoint import METADATA_FILE, SafeCheckpointReader, SafeLoadPlanner
from labkit.runs.folder import disk_problem

PLAIN_FILE_SUFFIX = ".pt"
"""Names with this suffix are plain files; all others are folders."""
CHECKPOINTS_TO_KEEP = 2
"""The newest checkpoint, and the one before in case it turns out to be bad."""
STEP_FOLDER_NAME = re.compile(r"step_\d{8}")
MAX_REASON_CHARACTERS = 300


class CheckpointError(LabError):
    """A training cannot be saved there, or resumed from there."""


def load_problem(path: Path) -> str:
    """Say why nothing can be loaded from this path, or return ""."""
    if not path.exists():
        return "is not there"
    if path.suffix == PLAIN_FILE_SUFFIX:
        return "" if zipfile.is_zipfile(path) else "is not a whole file of torch.save"
    found = (path / METADATA_FILE).is_file()
    return "" if found else f"is no complete save, which is a folder with {METADATA_FILE}"


def save_training(path: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save parameters, buffers, the optimizer's state and the step, at a new path.

    A collective. The model is plain, FSDP1 or FSDP2, without modules that differ from rank to rank.
    """
    plain = path.suffix == PLAIN_FILE_SUFFIX
    on_gpu = next(model.parameters()).device.type == "cuda"
    # FSDP1 on a CPU crashes with cpu_offload.
    options = StateDictOptions(full_state_dict=plain, cpu_offload=plain and on_gpu)
    weights, updates = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optimizer": updates, "step": step}
    with _explain_errors(f"save {path}", "name a folder that all ranks can write to", path.parent):
        if not plain:
            state_dict_saver.save(state, checkpoint_id=path)
        elif dist.get_rank() == 0:
            unfinished = path.with_name(f".{path.name}.part")
            torch.save(state, unfinished)
            # A simulation has nothing to save.
            if unfinished.exists():
                unfinished.rename(path)
    dist.barrier()


def load_training(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load a saved state into a model of the same kind and sizes; return its step. A collective."""
    plain = path.suffix == PLAIN_FILE_SUFFIX
    with _explain_errors(f"load {path}", "give a whole save of this model"):
        if plain:
            state = torch.load(path, map_location="cpu", weights_only=True)
            _refuse_other_model({name: each.shape for name, each in state["model"].items()}, model)
        else:
            table = SafeCheckpointReader(path).read_metadata().state_dict_metadata
            tensors = {name: each for name, each in table.items() if hasattr(each, "size")}
            sizes = {name: tensors[name].size for name in tensors if name.startswith("model.")}
            sizes = {name.partition(".")[2]: size for name, size in sizes.items()}
            _refuse_other_model(sizes, model)
            weights, updates = get_state_dict(model, optimizer)
            # Its tensors are filled in place.
            state = {"model": weights, "optimizer": updates, "step": 0}
            planner = SafeLoadPlanner()
            state_dict_loader.load(
                state, storage_reader=SafeCheckpointReader(path), planner=planner
            )
        options = StateDictOptions(full_state_dict=plain)
        saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **saved, options=options)
        return int(state["step"])


def _refuse_other_model(saved: Mapping[str, torch.Size], model: nn.Module) -> None:
    """Raise ValueError unless these are the names and sizes of the model's parameters."""
    weights: Mapping[str, Any] = get_model_state_dict(model)
    here = {name: each.shape for name, each in weights.items()}
    for name in [*here, *(saved.keys() - here.keys())]:
        sizes = [list(each[name]) if name in each else "absent" for each in (saved, here)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{name} is {sizes[0]} there, and {sizes[1]} in this model")


@contextlib.contextmanager
def _explain_errors(what: str, fix: str, folder: Path | None = None) -> Iterator[None]:
    """Turn any error of torch's saving and loading into a CheckpointError of one line."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if folder and (full := disk_problem(folder, "make room, or save on another disk")):
            raise CheckpointError(f"{what}: {full}") from None
        # Of the ranks' failures the first; the text of all holds their tracebacks.
        failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
        first, _ = next(iter(failures.values()))
        reason = " ".join(str(first).split())[:MAX_REASON_CHARACTERS]
        raise CheckpointError(f"{what}: {type(first).__name__}: {reason}; {fix}") from None


class CheckpointFolder:
    """A folder of saves that all ranks see; training resumes from the newest complete one.

    The constructor, which makes the folder, and all methods are collectives.
    """

    def __init__(self, folder: Path):
        self._folder, self._is_first = folder, dist.get_rank() == 0
        from_first: list[Any] = [None, None]
        if self._is_first:
            folder.mkdir(parents=True, exist_ok=True)
            # Incomplete saves of a run that was killed.
            for leftover in folder.glob(".step_*"):
                if STEP_FOLDER_NAME.fullmatch(leftover.name[1:]):
                    shutil.rmtree(leftover)
            newest = max((path.name for path in self._saves()), default=None)
            # A file with a new name shows which ranks see this very folder, and not one of the same
            # name on a disk of their own.
            mark = folder / f".seen_{uuid.uuid4().hex}"
            mark.touch()
            from_first = [mark.name, newest]
        dist.broadcast_object_list(from_first)
        mark, self._newest = folder / from_first[0], from_first[1]
        sees: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sees, mark.exists())
        if self._is_first:
            mark.unlink()
        if blind := [rank for rank, does in enumerate(sees) if not does]:
            where = f"ranks {blind} do not see rank 0's folder {folder}"
            raise ValueError(f"{where}: take one on a disk that all share")

    def _saves(self) -> list[Path]:
        """List the saves in the folder; other names are not touched."""
        found = [path for path in self._folder.iterdir() if STEP_FOLDER_NAME.fullmatch(path.name)]
        for path in found:
            if problem := load_problem(path):
                fix = "move it away, or name another folder for checkpoints"
                raise CheckpointError(f"{path} {problem}: {fix}")
        return sorted(found)

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the newest save, and return the number of trained steps, 0 without a save."""
        return load_training(self._folder / self._newest, model, optimizer) if self._newest else 0

    def save(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Save a training that has done ``step`` steps."""
        name = f"step_{step:08d}"
        unfinished = self._folder / f".{name}"
        # It ends with a barrier. The save gets its final name only when all ranks have written, so
        # one that was cut off is never loaded.
        save_training(unfinished, model, optimizer, step)
        if self._is_first:
            unfinished.rename(self._folder / name)
            for old in self._saves()[:-CHECKPOINTS_TO_KEEP]:
                shutil.rmtree(old.rename(self._folder / f".{old.name}"))
