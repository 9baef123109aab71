"""What the tests that run a learner's notebook share, wherever they run it."""

import ast
import json
import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "notebooks" / "src"


def read_small_values(name):
    """The small values of a lab's parameters, which its source has beside the tag: ``small={"STEPS": 1}``."""
    return parameters_cell(name)[0].get("small")


def read_points(name):
    """Values of all parameters with which a lab has to run, beside the tag as well, in the cell's order."""
    metadata, text = parameters_cell(name)
    names = re.findall(r"^(\w+):", text, flags=re.MULTILINE)
    return [dict(zip(names, values, strict=True)) for values in metadata.get("points", [])]


def parameters_cell(name):
    """What stands beside the tag of the cell that papermill changes, and the cell's text."""
    source = (SOURCES / f"{name}.py").read_text()
    (cell,) = re.findall(r'^# %% (tags=\["parameters"\].*)\n((?:(?!# %%).*\n)*)', source, flags=re.MULTILINE)
    words = re.split(r" (?=[a-z]+=)", cell[0])
    return {key: ast.literal_eval(value) for key, _, value in (word.partition("=") for word in words)}, cell[1]


def unused(values, runs):
    """Those of a notebook's parameters that no run was asked for."""
    infos = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    # A notebook names the ranks of each host.
    asked = [{"ranks": info["nproc"] // max(1, len(info.get("hosts", [])))} | info["params"] for info in infos]
    return [name for name, value in values.items() if value not in [each.get(name.lower()) for each in asked]]
