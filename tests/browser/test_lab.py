"""A person in JupyterLab starts ranks, watches them, interrupts them, restarts the kernel in mid-run."""

import re
import time

import nbformat
import psutil
import pytest
from fixture_notebook import press

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'labkit[dev]'")
pytestmark = [pytest.mark.browser, pytest.mark.calm, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

# A rank that stops in the middle of its steps until the test lets it go on.
PROGRAM = """
import os
import time
from pathlib import Path

from labkit.runs.records import RecordWriter

gate = Path(__file__).with_name("go_on")
writer = RecordWriter(Path(os.environ["LABKIT_RUN_FOLDER"]), int(os.environ["RANK"]))
writer.write("scalar", "planned_steps", -1, value=4, unit="steps")
for step in range(4):
    while step == 2 and not gate.exists():
        time.sleep(0.05)
    writer.write("span", "step", step, start_us=1000.0 * step, dur_us=500.0)
print("the rank says good-bye")
"""
SHORT_MS, LONG_MS = 20_000, 30_000


@pytest.fixture
def notebook(lab, open_notebook, screenshots, request):
    """A page with a notebook of three cells: import, run on two ranks, something small."""
    name = f"{re.sub(r'[^a-z_]', '_', request.node.name)}.ipynb"
    program = lab.folder / "steps.py"
    program.write_text(PROGRAM)
    sources = [
        "import labkit",
        f"result = labkit.run({str(program)!r}, nproc=2)\nresult",
        "print('alive', 6 * 7)",
    ]
    contents = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
    contents.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(contents, lab.folder / name)
    (lab.folder / "go_on").unlink(missing_ok=True)
    page = open_notebook(name)
    page.locator(".jp-Notebook .jp-CodeCell").nth(2).wait_for(timeout=LONG_MS)
    yield page
    page.screenshot(path=screenshots / f"end_of_{name.removesuffix('.ipynb')}.png")
    page.close()


def output(page, cell):
    return page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-Cell-outputArea")


def start_run(lab, page):
    """Start the run and wait until it stands before its third step; returns the ids of its processes."""
    before = set(lab.runs.glob("*"))
    press(page, 0)
    press(page, 1)
    output(page, 1).get_by_text(re.compile(r"step 2 of 4")).wait_for(timeout=LONG_MS)
    (folder,) = set(lab.runs.glob("*")) - before
    ranks = [int(path.read_text().split()[0]) for path in sorted(folder.glob("rank_*.pid"))]
    assert len(ranks) == 2
    return {*ranks, *(psutil.Process(rank).ppid() for rank in ranks)}


def assert_gone(processes):
    limit = time.monotonic() + 5
    while alive := {pid for pid in processes if psutil.pid_exists(pid)}:
        assert time.monotonic() < limit, f"still there after 5 s: {[psutil.Process(pid) for pid in alive]}"
        time.sleep(0.05)


def test_progress_is_seen_while_ranks_run_and_the_table_at_the_end(lab, notebook, screenshots):
    processes = start_run(lab, notebook)
    bar = output(notebook, 1).locator("progress")
    assert float(bar.get_attribute("value")) == 0.5
    assert all(psutil.pid_exists(pid) for pid in processes)
    notebook.screenshot(path=screenshots / "running.png")

    (lab.folder / "go_on").touch()
    table = output(notebook, 1).locator("table")
    table.wait_for(timeout=SHORT_MS)
    notebook.screenshot(path=screenshots / "finished.png")
    assert "step" in table.inner_text()
    assert bar.count() == 0, "the bar stayed after the end of the run"
    assert_gone(processes)


def test_the_stop_button_ends_the_ranks_and_the_kernel_lives_on(lab, notebook, screenshots):
    processes = start_run(lab, notebook)
    notebook.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    assert_gone(processes)
    output(notebook, 1).get_by_text("KeyboardInterrupt").first.wait_for(timeout=SHORT_MS)
    notebook.screenshot(path=screenshots / "interrupted.png")
    press(notebook, 2)
    output(notebook, 2).get_by_text("alive 42").wait_for(timeout=SHORT_MS)


def test_restarting_the_kernel_ends_the_ranks(lab, notebook):
    processes = start_run(lab, notebook)
    notebook.locator('[data-command="notebook:restart-kernel"]').first.click()
    notebook.locator(".jp-Dialog-button.jp-mod-accept").click(timeout=SHORT_MS)
    assert_gone(processes)
    press(notebook, 2)
    output(notebook, 2).get_by_text("alive 42").wait_for(timeout=LONG_MS)
