"""A person in JupyterLab writes rank code into cells: output, values, errors, an endless loop."""

import nbformat
import pytest
from fixture_notebook import output_of

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'labkit[dev]'")
pytestmark = [pytest.mark.browser, pytest.mark.calm, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]
LONG_MS = 40_000

CELLS = [
    "import labkit\nimport torch\nfrom torch import distributed as dist",
    """\
%%torchrun -n 3 --name sums
dist.init_process_group()
print("rank", dist.get_rank(), "is here")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
labkit.rank.give(total=x)
x""",
    "[rank.reported['total'].tolist() for rank in sums.ranks]",
    "%%torchrun -n 2\nx = 1\nfor rank in range(2)\n    x += rank",
    """\
%%torchrun -n 3
dist.init_process_group()
width = 4 - dist.get_rank() // 2
if width != 4:
    raise ValueError(f"width {width} is not 4")
dist.barrier()""",
    "%%torchrun -n 2 --timeout 3\nimport time\nwhile True:\n    time.sleep(0.1)",
    "print('alive', 6 * 7)",
]


@pytest.fixture
def notebook(lab, open_notebook, screenshots):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / "rank_code.ipynb")
    page = open_notebook("rank_code.ipynb", height=1900)
    page.locator(".jp-Notebook .jp-CodeCell").nth(len(CELLS) - 1).wait_for(timeout=LONG_MS)
    yield page
    page.close()


def test_cells_of_rank_code(notebook, screenshots):
    output_of(notebook, 0)
    shown = output_of(notebook, 1)
    assert all(f"[rank {rank}] rank {rank} is here" in shown for rank in range(3))
    assert "ranks 0–2: tensor([6., 6.])" in shown
    assert "[[6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]" in output_of(notebook, 2)
    shown = output_of(notebook, 3)
    assert "-->   3 | for rank in range(2)" in shown and "SyntaxError: expected ':'" in shown
    assert "interactiveshell" not in shown
    shown = output_of(notebook, 4)
    assert "rank 2 failed: ValueError: width 3 is not 4" in shown
    assert '-->   5 |     raise ValueError(f"width {width} is not 4")' in shown
    assert "launcher" not in shown, "labkit's own frames are not the learner's"
    shown = output_of(notebook, 5)
    assert "no end after 3 s" in shown and "ranks 0–1:" in shown and "-->   4 |     time.sleep(0.1)" in shown
    assert "alive 42" in output_of(notebook, 6)
    notebook.screenshot(path=screenshots / "rank_code.png", full_page=True)
