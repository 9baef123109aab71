"""The rank program of all checks: run a learner's functions on every rank and save their output.

The notebook's process judges the output. An answer that runs in this process could alter the code
that judges it here, so a rank raises WrongAnswer only if it cannot go on.
"""

import importlib
import json
import os
import posix
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import rank
from labkit.session.counted_group import join_counted_group
from labkit.session.payload import unpack_payload
from labkit_course.checks.judge import WrongAnswer

ANSWERS_FILE, STORE_FILE = "answers.pickle", "group"
# Ranks with a right answer finish within milliseconds of each other.
PEER_WAIT_S = 5.0
EARLY_EXIT_TEXT = "ended before the function returned: does it call exit()?"


@dataclass
class Config:
    """The answers, and the function that calls them."""

    # Each rank saves its output beside the pickled answers.
    folder: str = ""
    # SHA-256 of the file with the answers; no other file is unpickled.
    digest: str = ""
    # Module of run_answer, beside this one, such as "fsdp", and its keyword arguments as JSON.
    lab: str = ""
    setup: str = "{}"


def main(config: Config) -> None:
    """Run one rank of a check."""
    with rank.session():
        save_answer_output(Path(config.folder), config.digest, config.lab, json.loads(config.setup))


def save_answer_output(folder: Path, digest: str, lab: str, setup: Mapping[str, Any]) -> None:
    """Save what the lab's ``run_answer`` returns for the answers on this rank."""
    index, ranks = dist.get_rank(), dist.get_world_size()
    # Every call of the answer is counted, in whatever thread.
    store = dist.FileStore(str(folder / STORE_FILE), ranks)  # type: ignore[attr-defined]
    join_counted_group(store, index, ranks)
    try:
        module = importlib.import_module(f"labkit_course.checks.ranks.{lab}")
        # A function of os is pickled by the name that it has in posix.
        with patch.object(os, "fork", refuse_fork), patch.object(posix, "fork", refuse_fork):
            answers = unpack_payload(folder / ANSWERS_FILE, digest).values()
            values = plain_cpu_copy(module.run_answer(*answers, **setup))
    except SystemExit:
        raise WrongAnswer(f"rank {index} {EARLY_EXIT_TEXT}") from None
    path, partial = output_path(folder, index), folder / f"{index}.part"
    torch.save(values, partial)
    # The rename is atomic: a file under its final name is complete.
    partial.rename(path)
    # Peers that are still busy see an ended rank as a failure, so it waits for them. The wait is
    # bounded, because a peer that is stuck in a collective with this rank has to see it end.
    give_up = time.monotonic() + PEER_WAIT_S
    everyone = [output_path(folder, each) for each in range(ranks)]
    while not all(each.exists() for each in everyone) and time.monotonic() < give_up:
        time.sleep(0.01)


def refuse_fork() -> NoReturn:
    """Raise WrongAnswer in place of a fork, after which two processes would be one rank."""
    raise WrongAnswer("the function forks: a rank is one process, and a copy of it would send too")


def output_path(folder: Path, index: int) -> Path:
    """Return the path of a rank's output."""
    return folder / f"rank_{index:05d}.sent"


def plain_cpu_copy(value: Any) -> Any:
    """Copy nested values to plain CPU tensors.

    Raise WrongAnswer for a parameter, a meta or sparse tensor, or another subclass.
    """
    if isinstance(value, Mapping):
        return {name: plain_cpu_copy(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_cpu_copy(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, nn.Parameter):
        raise WrongAnswer("the function returned a Parameter, not a plain tensor")
    if value.is_meta or value.layout != torch.strided:
        where = f"{value.layout}, on {value.device}"
        raise WrongAnswer(f"the function returned a tensor without plain numbers: {where}")
    plain = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(plain) is not Tensor:
        raise WrongAnswer(f"the function returned a {type(plain).__name__}, not a plain tensor")
    return plain


if __name__ == "__main__":
    rank.run_main(main, Config)
