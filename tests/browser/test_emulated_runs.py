"""The kernel of a notebook is killed in the middle of an emulated run; and what a reader sees of such a run."""

import os
import signal
import time

import nbformat
import psutil
import pytest
from fixture_notebook import output_of, press

pytestmark = [pytest.mark.browser, pytest.mark.calm, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]
LONG_MS, GONE_WITHIN_S = 40_000, 5.0

CELLS = [
    """\
import os
import labkit
from labkit import plots
from labkit.theory import emulated_steps
links = labkit.Emulated(latency_us=2000, gb_per_s=0.05, forward_ms=10)
print("kernel", os.getpid())""",
    "labkit.run('ddp_compile', nproc=2, mode='ddp', layers=8, dim=64, steps=300, emulate=links)",
    """\
few = dict(mode='ddp', layers=8, dim=64, steps=2, batch=2, emulate=links)
sizes = {'a bucket each': dict(bucket_mb=0.0001), 'one bucket': dict(bucket_mb=100.0)}
runs = labkit.compare('ddp_compile', sizes, rounds=1, budget_s=0, **few)  # beside other tests all are disturbed
expected = {name: 1e3 * emulated_steps.ddp_step_s(links, 2, dim=64, layers=8, **each) for name, each in sizes.items()}
_ = plots.latency_bars(runs, predicted=expected)""",
]


@pytest.fixture
def notebook(request, lab, open_notebook):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    name = f"emulated_{abs(hash(request.node.name))}.ipynb"
    nbformat.write(notebook, lab.folder / name)
    page = open_notebook(name, height=1300)
    page.locator(".jp-Notebook .jp-CodeCell").nth(len(CELLS) - 1).wait_for(timeout=LONG_MS)
    yield page
    page.close()


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.3, 1.0, 4.0])
def test_a_killed_kernel_leaves_no_rank_of_an_emulated_run(notebook, after_s):
    kernel = psutil.Process(int(output_of(notebook, 0).split("kernel ")[1]))
    press(notebook, 1)
    time.sleep(after_s)
    family = kernel.children(recursive=True)
    assert family, "nothing was started"
    os.kill(kernel.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert not left
    assert not [each for each in psutil.process_iter() if f"LABKIT_NOTEBOOK_PID={kernel.pid}" in environment(each)]


def environment(process):
    """What a process got from the one that started it: NAME=value."""
    try:
        return [f"{name}={value}" for name, value in process.environ().items()]
    except psutil.Error:
        return []


@pytest.mark.long
def test_theory_is_dashed_across_the_bars_and_the_stamp_says_what_was_emulated(notebook, screenshots):
    output_of(notebook, 0)
    output_of(notebook, 2)
    picture = notebook.locator(".jp-RenderedImage img")
    picture.wait_for(timeout=LONG_MS)
    notebook.screenshot(path=screenshots / "emulated.png", full_page=True)
    width, height = picture.evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert width > 400 and height > 150
