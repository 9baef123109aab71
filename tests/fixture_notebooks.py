"""What the tests that run a learner's notebook share, wherever they run it."""

import json
from pathlib import Path

import jupytext

SOURCES = Path(__file__).resolve().parents[1] / "notebooks" / "src"


def read_small_values(name):
    """The small values of a lab's parameters, which its source has beside the tag: ``small={"STEPS": 1}``."""
    cells = jupytext.read(SOURCES / f"{name}.py", fmt="py:percent").cells
    (values,) = (cell.metadata.get("small") for cell in cells if "parameters" in cell.metadata.get("tags", []))
    return values


def unused(values, runs):
    """Those of a notebook's parameters that no run was asked for."""
    infos = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    asked = [{"ranks": info["nproc"]} | info["params"] for info in infos]
    return [name for name, value in values.items() if value not in [each.get(name.lower()) for each in asked]]
