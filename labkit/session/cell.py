"""The rank program behind ``%%torchrun``: runs a notebook cell on this rank, as its own script.

The notebook's side is launcher/magic.py. It sends the cell's text and the names listed after --use.
The value of the cell's last expression is kept with the run, as text named ``value``.
"""

import ast
import functools
import io
import linecache
import os
import pprint
import sys
import tokenize
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit import requirements, torch_private
from labkit.environment import ENV_DEVICE, ENV_RUN_FOLDER
from labkit.runs.folder import RunFolder, write_json, write_text
from labkit.session.emulated_wire import emulate_all_groups
from labkit.session.payload import load_emulated, load_payload
from labkit.session.session import batch_schedule_new_threads, separate_compiled_code

# What tracebacks and stacks call the cell.
CELL_NAME = "<cell>"
VALUE_ARTIFACT = "value"
MAX_LINE_LENGTH = 110


def main() -> None:
    """Run the cell, and keep the value of its last expression."""
    # The cell may change the environment and the names, so they are read before.
    folder, rank = RunFolder(Path(os.environ[ENV_RUN_FOLDER])), int(os.environ["RANK"])
    kept = folder.artifact(rank, VALUE_ARTIFACT)
    hardware = load_emulated()
    if hardware:
        emulate_all_groups(hardware)
    on_cpu = os.environ.get(ENV_DEVICE) == "cpu" or not torch.cuda.is_available()
    if not hardware:
        set_default_backend("gloo" if on_cpu else "cpu:gloo,cuda:nccl")
    separate_compiled_code(rank)
    # On GPUs the cell decides where it computes.
    if rank == 0 and on_cpu:
        machine = {"device": "cpu", "device_name": "CPU", "cores": len(requirements.usable_cores())}
        if hardware:
            machine |= {"device": "emulated", "device_name": hardware.describe()}
        write_json(folder.session_json, machine | {"torch": torch_private.TORCH_VERSION})
    names = {"torch": torch, "dist": dist} | load_payload()
    text = names.pop(CELL_NAME)
    lines = [f"{line}\n" for line in text.split("\n")]
    linecache.cache[CELL_NAME] = (len(text), None, lines, CELL_NAME)
    # pickle and dataclasses look up the cell's definitions in __main__.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    vars(module).update(names)
    device = torch.device("cpu" if on_cpu else "cuda")
    # This covers the threads of every process group that the cell creates.
    with batch_schedule_new_threads(device):
        value = execute_cell(text, vars(module))
    if value is not None:
        write_text(kept, pprint.pformat(value, width=MAX_LINE_LENGTH, sort_dicts=False))


def set_default_backend(backend: str) -> None:
    """Let process groups for which the cell names no backend have this one.

    Where there is a GPU, torch's default is NCCL alone, and a collective of CPU tensors an error.
    """

    def add_default(join: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(join)
        def join_with_default(given: str | None = None, *args: Any, **kwargs: Any) -> None:
            given = kwargs.pop("backend", given)
            if given is None and kwargs.get("device_id") is None:
                given = backend
            join(given, *args, **kwargs)

        return join_with_default

    for module in ("distributed", "device_mesh"):
        torch_private.wrap(f"{module}:init_process_group", add_default)


def execute_cell(text: str, names: dict[str, Any]) -> Any:
    """Execute code, and return the value of a last expression that ends in no semicolon."""
    tree = ast.parse(text, CELL_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, CELL_NAME, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), CELL_NAME, "eval"), names)
    return None if ends_in_semicolon(text) else value


def ends_in_semicolon(text: str) -> bool:
    """Tell whether the code ends in a semicolon; comments after it do not count."""
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type not in empty][-1:] == [";"]


if __name__ == "__main__":
    main()
