"""Writes records as a rank's session does, without torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from labkit.runs.folder import RunFolder, write_json
from labkit.runs.records import RecordWriter, record_path
from labkit.session.payload import load_config


@dataclass
class Config:
    steps: int = 4
    """How many timed steps."""
    pause_s: float = 0.0
    """Sleep in each step."""
    cut: bool = False
    """Whether rank 1's last line is cut off, as by a rank killed while it writes."""


def main(config: Config) -> None:
    rank, folder = int(os.environ["RANK"]), Path(os.environ["LABKIT_RUN_FOLDER"])
    writer = RecordWriter(folder, rank)
    print(f"<rank> {rank} has {os.environ['OMP_NUM_THREADS']} threads")
    if rank == 0:
        writer.write("scalar", "planned_steps", -1, value=config.steps, unit="steps")
        session = {"device": "cpu", "device_name": "cpu", "backend": "gloo", "cores": 1, "torch": "9.9", "note": ""}
        write_json(RunFolder(folder).session_json, session)
    for step in range(-1, config.steps):
        time.sleep(config.pause_s)
        writer.write("span", "step", step, start_us=0.0, dur_us=1e9 if step < 0 else 1000.0 * (rank + 1))
    writer.write("memory", "peak", config.steps, bytes=100 + rank)
    writer.write("comm", "all_reduce", config.steps, axis="", count=2, bytes=64)
    writer.close()
    if config.cut and rank == 1:
        with record_path(folder, rank).open("a") as file:
            file.write('{"v": 2, "rank": 1, "st')


if __name__ == "__main__":
    main(load_config(Config))
