"""Read what the notebook sent to this run, and send values back.

Parameters are values in run.json, from which ``load_config`` builds the program's Config. A program
marks functions that a run may replace:

    @rank.replaceable
    def exchange_halo(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
        '''A strip [N, C, H, W] with ``halo`` columns of each neighbour at its ends.'''
        ...

With ``labkit.run(..., use={"exchange_halo": mine})`` the program calls the notebook's function
instead. launcher/payload_pickling.py packs it into one file of the run's folder.
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

import torch

from labkit.config import build_config, parse_argv
from labkit.environment import ENV_PAYLOAD_SHA256, ENV_RUN_FOLDER
from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import RunFolder, read_json
from labkit.theory.emulated import Emulated, read_emulated

ConfigType = TypeVar("ConfigType")
ReplaceableFunction = TypeVar("ReplaceableFunction", bound=Callable[..., Any])
_replacements_not_called: set[str] = set()


def current_run_folder() -> RunFolder | None:
    """Return the folder of labkit's run that this rank belongs to; None under a bare torchrun."""
    path = os.environ.get(ENV_RUN_FOLDER)
    return RunFolder(Path(path)) if path else None


def load_config(config_class: type[ConfigType]) -> ConfigType:
    """Build this program's Config from run.json or the command line; it may refuse the values."""
    folder = current_run_folder()
    # A command line that is not empty wins, because a rank may start another program.
    if folder and not sys.argv[1:]:
        return build_config(config_class, read_json(folder.run_json).get("params", {}))
    return parse_argv(config_class, sys.argv[1:])


def load_emulated() -> Emulated | None:
    """Return the hardware that this run emulates, or None."""
    folder = current_run_folder()
    return read_emulated(read_json(folder.run_json).get("emulate")) if folder else None


def replaceable(function: ReplaceableFunction) -> ReplaceableFunction:
    """Let ``use=`` replace this function with the notebook's function of the same name."""
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
    """Tell whether this run replaces a replaceable function."""
    return function.__name__ in load_payload()


def check_replacements_called() -> None:
    """Raise ValueError if a replacement was never called: the run says nothing about it."""
    if _replacements_not_called:
        problem = f"use= gave {', '.join(sorted(_replacements_not_called))}, and this run never"
        raise ValueError(f"{problem} called it: choose parameters with which it is used")


def load_payload() -> dict[str, Any]:
    """Return everything that the notebook sent to this run, by name; {} under a bare torchrun."""
    folder = current_run_folder()
    if not folder or not folder.payload.exists():
        return {}
    return unpack_payload(folder.payload, os.environ.get(ENV_PAYLOAD_SHA256, ""))


@functools.cache
def unpack_payload(path: Path, digest: str) -> dict[str, Any]:
    """Unpack what ``payload_pickling.pack_payload`` packed; raise LabError for another digest."""
    packed = path.read_bytes()
    # Another user may have replaced the file, and unpickling runs code.
    if sha256(packed).hexdigest() != digest:
        raise LabError(
            f"{path} is not what the notebook gave to this run: run again, from a folder in which"
            f" nobody else can write (or pass on {ENV_PAYLOAD_SHA256} to the ranks)"
        )
    file = io.BytesIO(packed)
    place = pickle.load(file)
    # The functions may import whatever the notebook can.
    sys.path += [folder for folder in place["path"] if folder not in sys.path]
    # Tracebacks show the notebook's lines.
    for name, lines in place["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    content: dict[str, Any] = pickle.load(file)
    # torch.compile looks for a function's globals in the module that it names.
    main = vars(sys.modules["__main__"])
    for own in (getattr(each, "__globals__", {}) for each in content.values()):
        if own.get("__name__") == "__main__":
            main.update(own | main)
    return content


def report(**values: Any) -> None:
    """Send tensors, numbers and text to the notebook, as ``result.ranks[i].reported``.

    A later call adds to an earlier one.
    """
    folder = current_run_folder()
    # Under a bare torchrun there is no notebook.
    if not folder:
        print("\n".join(f"{name} = {value!r}" for name, value in values.items()))
        return
    path = folder.report(int(os.environ["RANK"]))
    before = torch.load(path, weights_only=True) if path.exists() else {}
    copies = {name: plain_data_copy(value, name) for name, value in values.items()}
    unfinished = path.with_suffix(".part")
    with private_files.open_file(unfinished, "wb") as file:
        torch.save(before | copies, file)
    unfinished.replace(path)


def plain_data_copy(value: Any, name: str) -> Any:
    """Copy plain nested data with every tensor detached and on the CPU, or raise TypeError."""
    copy = functools.partial(plain_data_copy, name=name)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, dict):
        return {copy(key): copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copy(each) for each in value]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta:
            return value.cpu().clone()
    raise TypeError(
        f"report({name}=...): a {type(value).__name__} cannot be sent home. Send plain tensors "
        "(of a DTensor its to_local()), numbers, text, or lists and dicts of these"
    )
