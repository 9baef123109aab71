"""Run a program of launch/ once for each of some sets of parameters, in one launch: a cell each, one after the other.

Each cell leaves records and what it printed in a folder of its own below the run's, for tests/fixture_cells.py to read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from labkit import config as configs
from labkit import rank
from labkit.environment import ENV_RUN_FOLDER
from labkit.runs.folder import RunFolder
from labkit.runs.records import RecordWriter


@dataclass
class Config:
    name: str = "fsdp_wrap"
    """Of a program in launch/."""
    cells: tuple[str, ...] = ("{}",)
    """Its parameters in each cell, as JSON."""


def main(config: Config) -> None:
    program = importlib.import_module(f"launch.{config.name}")
    with rank.session() as here:
        mesh = functools.cache(here.mesh)  # equal meshes share groups: torch's caches hand out those of the first one
        for index, cell in enumerate(config.cells):
            folder = Path(os.environ[ENV_RUN_FOLDER]) / f"cell_{index:03d}"
            folder.mkdir(exist_ok=True)
            own = rank.Session(here.rank, here.world_size, here.device, RecordWriter(folder, here.rank))
            own.mesh = mesh
            parameters = configs.build_config(program.Config, json.loads(cell), here.world_size)
            with (
                patch.object(rank, "session", lambda own=own: contextlib.nullcontext(own)),
                RunFolder(folder).log(here.rank).open("w") as log,
                contextlib.redirect_stdout(log),
                contextlib.suppress(SystemExit),  # a verdict that is not ok: its record says so
            ):
                program.main(parameters)


if __name__ == "__main__":
    rank.run_main(main, Config)
