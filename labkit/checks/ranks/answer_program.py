"""The rank program of all checks: gives a learner's functions work on every rank, and sends home
what came of it.

It says of no answer that it is right: the answer runs in this process, and could change whatever
would judge it here. The notebook's process does, with what every rank has sent. What cannot go on
is another matter: a rank may raise Wrong.
"""

import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import rank
from labkit.checks.judge import WrongAnswer
from labkit.session.payload import unpack_payload

ANSWERS_FILE = "answers.pickle"
PEER_WAIT_S = 5.0  # in right answers ranks are done within milliseconds of each other
EARLY_EXIT_TEXT = "ended before the function returned: does it call exit()?"


@dataclass
class Config:
    """Whose answers, and what to do with them."""

    folder: str = ""
    """Where the answers lie, and where each rank leaves what it sends home."""
    digest: str = ""
    """The SHA-256 of the file with the answers; nothing else is unpickled."""
    lab: str = ""
    """The module beside this one whose ``run_answer`` calls the answers, such as "fsdp"."""
    setup: str = "{}"
    """Arguments by name for that function, as JSON."""


def main(config: Config) -> None:
    """Be one rank of a check."""
    with rank.session():
        save_answer_output(Path(config.folder), config.digest, config.lab, json.loads(config.setup))


def save_answer_output(folder: Path, digest: str, lab: str, setup: Mapping[str, Any]) -> None:
    """Let the lab's ``run_answer`` call the answers, and leave what it returns in the folder. A
    collective.

    Raises:
        Wrong: the answer cannot be worked with, or wants to end this process.
    """
    try:
        answers = unpack_payload(folder / ANSWERS_FILE, digest).values()
        values = plain_cpu_copy(
            importlib.import_module(f"labkit.checks.ranks.{lab}").run_answer(*answers, **setup)
        )
    except SystemExit:
        raise WrongAnswer(f"rank {dist.get_rank()} {EARLY_EXIT_TEXT}") from None
    path, ranks = output_path(folder, dist.get_rank()), range(dist.get_world_size())
    torch.save(values, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    # A rank that ends looks like a failure to those still busy; but who waits for it in a
    # collective must learn of it.
    give_up = time.monotonic() + PEER_WAIT_S
    while (
        not all(output_path(folder, index).exists() for index in ranks)
        and time.monotonic() < give_up
    ):
        time.sleep(0.01)


def output_path(folder: Path, index: int) -> Path:
    """The file with what a rank has sent home."""
    return folder / f"rank_{index:05d}.sent"


def plain_cpu_copy(value: Any) -> Any:
    """The same with every tensor as a plain one of its own memory, on the CPU.

    Raises:
        Wrong: a tensor has no numbers of its own on this rank.
    """
    if isinstance(value, Mapping):
        return {name: plain_cpu_copy(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_cpu_copy(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    if value.is_meta or value.layout != torch.strided:
        raise WrongAnswer(
            f"the function returned a tensor without plain numbers: {value.layout}, on"
            f" {value.device}"
        )
    plain = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(plain) is not Tensor:
        raise WrongAnswer(f"the function returned a {type(plain).__name__}, not a plain tensor")
    return plain


if __name__ == "__main__":
    rank.run_main(main, Config)
