"""What a notebook gives to its ranks, and what they give back to it.

A program says which of its functions can be replaced, with a default, a signature and a docstring:

    @rank.replaceable
    def exchange_halo(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
        '''A strip [N, C, H, W] with ``halo`` columns of each neighbour at its ends.'''
        ...

Under ``labkit.run(..., use={"exchange_halo": mine})`` it calls the notebook's function instead. Whatever is given lies
in one file of the run's folder, pickled by launcher/packet.py.
"""

import functools
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from labkit.environment import ENV_PAYLOAD_SHA256, ENV_RUN_FOLDER
from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import RunFolder

ReplaceableFunction = TypeVar("ReplaceableFunction", bound=Callable[..., Any])
_replacements_not_called: set[str] = set()


def replaceable(function: ReplaceableFunction) -> ReplaceableFunction:
    """Let a run replace this function of its program by one of the notebook's, of the same name in ``use=``."""
    theirs = load_payload().get(function.__name__)
    if theirs is None:
        return function
    _replacements_not_called.add(function.__name__)

    @functools.wraps(function)
    def call_replacement(*args: Any, **kwargs: Any) -> Any:
        _replacements_not_called.discard(function.__name__)
        return theirs(*args, **kwargs)

    return call_replacement  # type: ignore[return-value]


def is_replaced(function: Callable[..., Any]) -> bool:
    """Whether this run replaces a replaceable function."""
    return function.__name__ in load_payload()


def check_replacements_called() -> None:
    """Raise ValueError if a function that was given has not been called: then the run says nothing of it."""
    if _replacements_not_called:
        names = ", ".join(sorted(_replacements_not_called))
        raise ValueError(
            f"use= gave {names}, and this run never called it: choose parameters with which it is used"
        )


def load_payload() -> dict[str, Any]:
    """Everything that the notebook gave to this run, by name; {} under a bare torchrun."""
    path = (
        RunFolder(Path(os.environ[ENV_RUN_FOLDER])).payload
        if ENV_RUN_FOLDER in os.environ
        else None
    )
    return (
        unpack_payload(path, os.environ.get(ENV_PAYLOAD_SHA256, ""))
        if path and path.exists()
        else {}
    )


@functools.cache
def unpack_payload(path: Path, digest: str) -> dict[str, Any]:
    """What ``payload_pickling.pack_payload`` packed.

    It may import whatever the notebook can, and its tracebacks show its lines.

    Args:
        path: the file, which another user may have put in the place of the notebook's.
        digest: the SHA-256 of what the notebook packed; it came here on a way on which nobody else can write.

    Raises:
        LabError: the file holds something else, of which nothing was unpickled.
    """
    packed = path.read_bytes()
    if sha256(packed).hexdigest() != digest:
        fix = f"run again, from a folder in which nobody else can write (or pass on {ENV_PAYLOAD_SHA256} to the ranks)"
        raise LabError(f"{path} is not what the notebook gave to this run: {fix}")
    file = io.BytesIO(packed)
    place = pickle.load(file)
    sys.path += [folder for folder in place["path"] if folder not in sys.path]
    for name, lines in place["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    content: dict[str, Any] = pickle.load(file)
    return content


def report(**values: Any) -> None:
    """Send values home to the notebook, by name, for ``result.ranks[i].gave``. Small ones: tensors, numbers, text.

    A second call adds to what an earlier one gave. Under a bare torchrun it prints them instead.

    Raises:
        TypeError: a value is not tensors, numbers, text, or lists, tuples and dicts of these.
    """
    import torch

    if ENV_RUN_FOLDER not in os.environ:
        print("\n".join(f"{name} = {value!r}" for name, value in values.items()))
        return
    path = RunFolder(Path(os.environ[ENV_RUN_FOLDER])).report(int(os.environ["RANK"]))
    before = torch.load(path, weights_only=True) if path.exists() else {}
    unfinished = path.with_suffix(".part")
    with private_files.open_file(unfinished, "wb") as file:
        torch.save(
            before | {name: plain_data_copy(value, name) for name, value in values.items()}, file
        )
    unfinished.replace(path)


def plain_data_copy(value: Any, name: str) -> Any:
    """The same with every tensor as a plain one of its own memory, on the CPU. Raises TypeError for what is no data."""
    import torch

    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, dict):
        return {
            plain_data_copy(key, name): plain_data_copy(each, name) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_data_copy(each, name) for each in value]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta:
            return value.cpu().clone()
    raise TypeError(
        f"give({name}=...): a {type(value).__name__} cannot be sent home. Send plain tensors (of a DTensor its "
        f"to_local()), numbers, text, or lists and dicts of these"
    )
