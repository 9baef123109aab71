"""Every learner's notebook opens in JupyterLab, and two of them run to the end with Run All Cells."""

import re

import nbformat
import pytest
from fixture_long import long_but
from fixture_notebooks import read_small_values, unused
from fixture_processes import is_alive, wait_for
from nbformat.reader import NotJSONError

from notebooks.tools.build import FOLDER
from notebooks.tools.source import find_labs

pytestmark = [pytest.mark.browser, pytest.mark.calm, pytest.mark.xdist_group("browser"), pytest.mark.timeout(240)]
LABS = {lab.name: lab for lab in find_labs(FOLDER)}
RUN = ["01_spatial_sharding", "07_when_it_breaks"]
"""The labs that are run, with their small values: programs of labkit, explorers, and ranks that fail."""
LONG_MS = 60_000


@pytest.fixture
def opened(request, lab, open_notebook, screenshots):
    """A learner's notebook in a page of its own, and its file."""
    learner = LABS[request.param].learner
    path = lab.folder / learner.name
    notebook = nbformat.read(learner, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    if path.stem in RUN:
        cell.source += "".join(f"\n{name} = {value}" for name, value in read_small_values(path.stem).items())
    nbformat.write(notebook, path)
    page = open_notebook(path.name, height=1000)
    yield page, path
    page.screenshot(path=screenshots / f"lab_{path.stem}.png")
    page.close()


@pytest.mark.parametrize("opened", long_but(["01_spatial_sharding", "06_does_it_fit"], LABS), indirect=True)
def test_a_notebook_opens_rendered(opened):
    page, path = opened
    title = re.match(r"# (.+)", nbformat.read(path, as_version=4).cells[0].source)[1]
    page.get_by_role("heading", name=title, level=1).wait_for(timeout=LONG_MS)
    assert page.locator(".jp-mod-error, .jp-MarkdownCell:not(.jp-mod-rendered) .jp-Editor:visible").count() == 0


@pytest.mark.parametrize(
    "opened",
    long_but([], RUN),
    indirect=True,  # test_lab.py and test_torchrun.py run cells; nbval runs lab 1
)
def test_a_notebook_runs_to_its_end_without_an_error(opened, lab, run_all):
    page, path = opened
    before = set(lab.runs.glob("*"))
    run_all(page)
    done = wait_for(lambda: saved_to_its_end(page, path), limit_s=200)
    failed = [cell.source for cell in done for output in cell.outputs if output.output_type == "error"]
    assert failed == []
    assert unused(read_small_values(path.stem), lab.runs) == []
    ids = [path for folder in set(lab.runs.glob("*")) - before for path in folder.glob("rank_*.pid")]
    ranks = [int(path.read_text().split()[0]) for path in ids]
    assert len(ranks) > 20, "it starts real ranks"
    assert not any(map(is_alive, ranks))


def saved_to_its_end(page, path):
    """The executed cells of code, once the last one has been."""
    page.wait_for_timeout(1000)
    page.keyboard.press("Control+s")
    try:
        cells = nbformat.read(path, as_version=4).cells
    except NotJSONError:  # read while it is being saved
        return None
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source]
    return code if code[-1].execution_count else None
