"""Many runs for the price of one launch: the same program with several sets of parameters, in the same ranks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import labkit
from labkit.runs.folder import RunFolder, read_json, write_json

PROGRAM = Path(__file__).parent / "programs" / "cells.py"


def run_cells(
    program: str, nproc: int, cells: Sequence[Mapping[str, Any]], timeout_s: float = 110
) -> list[labkit.RunResult]:
    """What ``labkit.run(program, nproc=nproc, device="cpu", **cell)`` gives for each cell.

    A check whose verdict is not ok raises nothing here: its result has the value ok = 0.
    """
    words = [json.dumps(cell) for cell in cells]
    whole = labkit.run(PROGRAM, nproc=nproc, device="cpu", timeout_s=timeout_s, name=program, cells=words)
    results = []
    for index, cell in enumerate(cells):
        folder = RunFolder(whole.folder / f"cell_{index:03d}")
        write_json(folder.run_json, read_json(RunFolder(whole.folder).run_json) | {"program": program, "params": cell})
        results.append(labkit.load(folder.path))
    return results
