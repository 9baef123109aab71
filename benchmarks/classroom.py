"""Do twenty notebooks on one machine work at once, as when twenty people share a JupyterHub?

    python benchmarks/classroom.py              # twenty kernels: four minutes on two cores

Every kernel executes the first five code cells of lab 0 as a learner has them, two of which start four ranks. Their
output has to be that of the solved notebook. The runs take turns by labkit's queue. Prints one JSON object last:
``outside`` counts ports that kernels and ranks opened to other machines, ``left`` the processes and tickets of the
queue that remain.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import tyro

from labkit.environment import ENV_QUEUE, ENV_RUNS_FOLDER

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
# Of code: the one that would install labkit, and five of the lab.
CELLS = 1 + 5
LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass
class Options:
    kernels: int = 20
    """How many notebooks run at once."""
    timeout_s: float = 600
    """After this, a cell has failed."""


def first_cells() -> Any:
    """The learner's lab 0 up to the fifth code cell."""
    notebook = nbformat.read(NOTEBOOKS / "00_ranks.ipynb", as_version=4)
    places = [place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    notebook.cells = notebook.cells[: places[CELLS - 1] + 1]
    return notebook


def text_of(cell: Any) -> str:
    """What a cell has printed and returned. Progress is a display, and differs."""
    outputs = [each for each in cell.get("outputs", []) if each.output_type != "display_data"]
    return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs)


def differences(notebook: Any) -> list[str]:
    """The cells whose output is not that of the solved notebook, among those where it is the same each time."""
    solved = nbformat.read(NOTEBOOKS / "solved" / "00_ranks.ipynb", as_version=4)
    same_each_time = [cell for cell in solved.cells if "nbval-ignore-output" not in cell.metadata.get("tags", [])]
    right = {cell.id: text_of(cell) for cell in same_each_time}
    ours = {cell.id: text_of(cell) for cell in notebook.cells if cell.id in right}
    assert any(right[name] for name in ours), "some output is compared"
    wrong = [f"{name}: {said!r}, not {right[name]!r}" for name, said in ours.items() if said != right[name]]
    # The last cell starts ranks of which one fails; who they are differs.
    failure = "rank 1 failed: ValueError: my samples are missing"
    return wrong + ([] if failure in text_of(notebook.cells[-1]) else [f"not said: {failure}"])


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def ports_to_other_machines() -> set[str]:
    """The addresses at which a process below this one listens, without those of this machine alone."""
    found = set()
    for process in descendants():
        try:
            listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        found |= {f"{each.laddr.ip}:{each.laddr.port}" for each in listening if not each.laddr.ip.startswith(LOOPBACK)}
    return found


async def execute(folder: Path, timeout_s: float) -> str:
    """Execute the cells in a kernel of their own, and return what went wrong, or ""."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = first_cells()
    options: dict[str, Any] = {
        "timeout": timeout_s,
        "startup_timeout": 300,
        "resources": {"metadata": {"path": folder}},
        # Each kernel would warn of its unencrypted ports.
        "extra_arguments": ["--IPKernelApp.log_level=CRITICAL"],
    }
    client = NotebookClient(notebook, **options)
    try:
        await client.async_execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(differences(notebook))


async def execute_all(folder: Path, options: Options) -> tuple[list[str], set[str]]:
    """Return what went wrong in each kernel, and the ports that were open to other machines."""
    places = [folder / str(number) for number in range(options.kernels)]
    for place in places:
        place.mkdir()
    notebooks = asyncio.gather(*(execute(place, options.timeout_s) for place in places))
    outside: set[str] = set()
    while not notebooks.done():
        outside |= await asyncio.to_thread(ports_to_other_machines)
        await asyncio.sleep(1)
    return await notebooks, outside


def main(options: Options) -> None:
    os.environ.pop(ENV_QUEUE, None)
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {ENV_RUNS_FOLDER: f"{name}/runs", "XDG_RUNTIME_DIR": name}
        start_s = time.monotonic()
        wrong, outside = asyncio.run(execute_all(Path(name), options))
        seconds = time.monotonic() - start_s
        psutil.wait_procs(descendants(), timeout=5)
        left = [process.pid for process in descendants()]
        left += [path.name for path in Path(name).glob("labkit-queue-*/*-*")]
        runs = len(list(Path(name, "runs").glob("*/run.json")))
    for number, problem in enumerate(wrong):
        print(f"kernel {number}: {problem or 'as in the solved notebook'}")
    right = wrong.count("")
    counts = {"kernels": options.kernels, "right": right, "runs": runs, "outside": len(outside), "left": len(left)}
    ok = right == options.kernels and runs == 2 * options.kernels and not outside and not left
    print(json.dumps({"bench": "classroom"} | counts | {"seconds": round(seconds, 1), "ok": ok}))


if __name__ == "__main__":
    main(tyro.cli(Options))
