"""The rank program of ``%%torchrun``: runs a notebook's cell on this rank, as a script of its own.

The notebook's side is launcher/magic.py. It gives the cell's text and the names that go with it; back comes the text of
the cell's last expression, kept with the run as ``value``.
"""

import ast
import linecache
import os
import pprint
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.folder import VARIABLE, RunFolder
from labkit.rank.given import given

NAME = "<cell>"
"""What tracebacks and stacks call the cell."""
VALUE = "value"
WIDTH = 110


def main() -> None:
    """Run the cell, and keep what its last expression gives."""
    content = given()
    text: str = content["text"]
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where pickle and dataclasses look for what the cell defines
    names = vars(module) | {"torch": torch, "dist": dist} | content["names"]
    vars(module).update(names)
    value = execute(text, vars(module))
    if value is not None:
        path = RunFolder(Path(os.environ[VARIABLE])).kept(int(os.environ["RANK"]), VALUE)
        path.write_text(pprint.pformat(value, width=WIDTH, sort_dicts=False))


def execute(text: str, names: dict[str, Any]) -> Any:
    """Execute code; the value of its last statement if that is an expression without a semicolon, else None."""
    tree = ast.parse(text, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NAME, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
    return None if text.rstrip().endswith(";") else value


if __name__ == "__main__":
    main()
