"""What the tests that run a learner's notebook share, wherever they run it."""

import json
import re
from pathlib import Path

import jupytext

SOURCES = Path(__file__).resolve().parents[1] / "notebooks" / "src"


def read_small_values(name):
    """The small values of a lab's parameters, which its source has beside the tag: ``small={"STEPS": 1}``."""
    return parameters_cell(name).metadata.get("small")


def read_points(name):
    """Values of all parameters with which a lab has to run, beside the tag as well, in the cell's order."""
    cell = parameters_cell(name)
    names = re.findall(r"^(\w+):", cell.source, flags=re.MULTILINE)
    return [dict(zip(names, values, strict=True)) for values in cell.metadata.get("points", [])]


def parameters_cell(name):
    """The cell of a lab's source that papermill changes."""
    cells = jupytext.read(SOURCES / f"{name}.py", fmt="py:percent").cells
    (cell,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
    return cell


def unused(values, runs):
    """Those of a notebook's parameters that no run was asked for."""
    infos = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    # A notebook names the ranks of each host.
    asked = [{"ranks": info["nproc"] // max(1, len(info.get("hosts", [])))} | info["params"] for info in infos]
    return [name for name, value in values.items() if value not in [each.get(name.lower()) for each in asked]]
