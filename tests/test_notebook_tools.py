"""From a source to notebooks, pages and pictures, on a small sample."""

import base64
import io
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy
import pytest
from PIL import Image

from labkit.models import photo
from notebooks.tools import build, execute, run, source

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = """\
# %% [markdown]
# # A sample

# %% tags=["parameters"]
ranks: int = 2  # number of ranks

# %% [markdown]
# ## 1. Count the bytes

# %%
def halo_bytes(rows):
    ### BEGIN SOLUTION
    width = 4
    return rows * width
    ### END SOLUTION

# %%
import sys

print("bytes", halo_bytes(3), end=" ")
sys.stdout.flush()
print("for", ranks)

# %% [markdown]
# ## 2. A picture, at last

# %%
import matplotlib.pyplot as plt

_ = plt.plot([1, 2])

# %% tags=["summary"]
print("all", "well")
"""


@pytest.fixture
def folder(tmp_path):
    """A notebooks folder with one lab, below a folder with a blank in its name."""
    folder = tmp_path / "my notebooks"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "07_sample.py").write_text(SAMPLE)
    return folder


def run_script(name, *arguments):
    """Run notebooks/<name> from another folder."""
    command = [sys.executable, "-m", f"notebooks.tools.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd="/")


@pytest.fixture
def called(monkeypatch, capsys):
    """The same in this process, without its imports: exit status and what was written, from another folder."""
    monkeypatch.chdir("/")

    def call(main, *arguments, **options):
        capsys.readouterr()
        status = main(*arguments, **options)
        return subprocess.CompletedProcess(main.__module__, status, *capsys.readouterr())

    return call


def test_learner_gets_a_placeholder_and_the_solved_one_no_markers(folder):
    path = folder / "src" / "07_sample.py"
    learner, solved = source.learner_notebook(path), source.solved_notebook(path)
    exercise = next(cell.source for cell in learner.cells if "def halo_bytes" in cell.source)
    assert exercise == "def halo_bytes(rows):\n    ...  # your code here"
    answer = next(cell.source for cell in solved.cells if "def halo_bytes" in cell.source)
    assert answer == "def halo_bytes(rows):\n    width = 4\n    return rows * width"
    assert not any("SOLUTION" in source.as_text(notebook) for notebook in (learner, solved))


def test_an_answer_can_be_opened_below_the_check_and_is_not_in_the_solved_notebook(folder):
    lab = source.find_labs(folder)[0]
    cells = source.learner_notebook(lab.source).cells
    (place,) = [index for index, cell in enumerate(cells) if "<details>" in cell.source]
    assert "print(" in cells[place - 1].source, "below the cell that uses it"
    assert "    width = 4\n    return rows * width\n```" in cells[place].source
    assert not any("<details>" in cell.source for cell in source.solved_notebook(lab.source).cells)


@pytest.mark.parametrize("tag", ["commit", "look"])
def test_a_commitment_or_look_loses_its_solution_without_a_trace_and_a_claim_is_folded_away(folder, tag):
    (folder / "src" / "07_sample.py").write_text(
        f'# %% tags=["{tag}"]\n'
        'mine = {"bytes": None}\n### BEGIN SOLUTION\nmine = {"bytes": 12}\n### END SOLUTION\n\n'
        '# %% tags=["claim"]\nclaim("it is so", True)\n'
    )
    lab = source.find_labs(folder)[0]
    learner, solved = source.learner_notebook(lab.source).cells, source.solved_notebook(lab.source).cells
    assert [cell.source.strip() for cell in learner[1:]] == ['mine = {"bytes": None}', 'claim("it is so", True)']
    assert 'mine = {"bytes": 12}' in solved[0].source
    assert [cell.metadata.get("jupyter") for cell in learner[1:]] == [None, {"source_hidden": True}]


@pytest.mark.parametrize(
    ("urls", "found", "called"),
    [
        ({}, None, "install --quiet labkit-*.whl"),
        ({"urls": {"Source": "https://example.org/labkit"}}, None, "install --quiet git+https://example.org/labkit"),
        ({}, "a spec", ""),
    ],
)
def test_a_learners_first_cell_of_code_installs_labkit_where_it_is_missing(monkeypatch, urls, found, called):
    class Shell:
        called = ""

        def run_line_magic(self, name, line):
            self.called = line if name == "pip" else name

    shell = Shell()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "labkit" else 1 / 0)
    exec(source.install_cell(urls).source, {"get_ipython": lambda: shell})
    assert shell.called == called


def test_the_learners_notebook_alone_begins_with_that_cell_once_whatever_is_above(folder):
    path = folder / "src" / "07_sample.py"
    learner, solved = source.learner_notebook(path).cells, source.solved_notebook(path).cells
    assert [cell.id for cell in learner].index(source.INSTALL_ID) == 1, "below the title"
    assert [cell.id for cell in learner if cell.cell_type == "code"].count(source.INSTALL_ID) == 1
    assert source.INSTALL_ID not in [cell.id for cell in solved]


ADDRESS = {"urls": {"Source": "https://github.com/someone/labkit"}}
README = "# labkit\n\nLearn.\n```\ngit clone <this repository> labkit && cd labkit\n```\n"


def test_badges_and_clone_follow_the_repositorys_address_and_go_with_it(repository):
    line = source.badges(ADDRESS, "notebooks/00_ranks.ipynb")
    assert "(https://colab.research.google.com/github/someone/labkit/blob/main/notebooks/00_ranks.ipynb)" in line
    assert "(https://mybinder.org/v2/gh/someone/labkit/main?labpath=notebooks/00_ranks.ipynb)" in line
    assert "(https://codespaces.new/someone/labkit)" in line
    with_badges = build.with_address(README, ADDRESS)
    assert with_badges == README.replace("\n\nLearn", f"\n\n{line}\n\nLearn").replace(
        "<this repository>", "https://github.com/someone/labkit"
    )
    assert build.with_address(with_badges, ADDRESS) == with_badges
    assert build.with_address(with_badges, {}) == README
    readme = (repository / "README.md").read_text()
    assert len(build.with_address(readme, {"urls": {"Source": f"https://github.com/{'x' * 30}/labkit"}})) <= 4000


@pytest.mark.parametrize("address", ["https://github.com/someone/labkit.git", "https://github.com/someone/labkit/"])
def test_an_address_may_end_as_one_copies_it(address):
    assert source.badges({"urls": {"Source": address}}, "x") == source.badges(ADDRESS, "x")


def test_no_badge_where_the_services_know_no_such_repository():
    assert source.badges({}, "x") == source.badges({"urls": {"Source": "https://example.org/labkit"}}, "x") == ""


def test_a_learners_notebook_has_its_badges_below_the_title(folder, monkeypatch):
    path = folder / "src" / "07_sample.py"
    without = source.learner_notebook(path)
    pyproject = folder / "pyproject.toml"
    pyproject.write_text('[project]\nurls = { Source = "https://github.com/someone/labkit" }\n')
    monkeypatch.setattr(source, "PYPROJECT", pyproject)
    learner = source.learner_notebook(path)
    assert [cell.id for cell in learner.cells].index(source.BADGES_ID) == 1
    assert "blob/main/notebooks/07_sample.ipynb)" in learner.cells[1].source
    ours, theirs = ({cell.id for cell in each.cells} for each in (without, learner))
    assert theirs - ours == {source.BADGES_ID}, "no other cell looks new to a learner's copy"
    assert source.BADGES_ID not in {cell.id for cell in source.solved_notebook(path).cells}


def test_same_source_same_bytes_and_ids_that_last(folder):
    path = folder / "src" / "07_sample.py"
    before = source.learner_notebook(path)
    assert source.as_text(before) == source.as_text(source.learner_notebook(path))
    path.write_text("# %%\nnew = 1\n\n" + SAMPLE)
    after = source.learner_notebook(path)
    before, after = ([cell.id for cell in each.cells if cell.id != source.INSTALL_ID] for each in (before, after))
    assert after[1:] == before


EXERCISE = """\
# %%
from labkit_course.checks import simulation as checks

# %% [markdown]
# ### Exercise 3: bytes on the wire (optional, ••, 6 minutes)

# %%
def leaky(bytes):
    return 0

# %%
checks.wire_bytes(leaky)

# %%
class Wire:
    ### BEGIN SOLUTION
    pass
    ### END SOLUTION

# %%
verdict = checks.wire_bytes(Wire)
verdict

# %%
checks.wire_bytes(Wire)

# %%
so_far("simulation")
"""


def test_an_exercise_is_marked_for_nbgrader_and_for_progress_under_names_that_last(folder):
    path = folder / "src" / "07_sample.py"
    path.write_text(EXERCISE)
    before = source.learner_notebook(path)
    assert before.metadata.labkit == {"lab": "simulation"}
    marked = [(cell.id, cell.metadata) for cell in before.cells if "nbgrader" in cell.metadata]
    whole = {"schema_version": 3, "task": False}
    answer = {"grade_id": "answer-Wire", "grade": False, "solution": True, "locked": False}
    check = {"grade_id": "check-Wire", "grade": True, "solution": False, "locked": True, "points": 2}
    about = {"exercise": "Wire", "number": "7.3", "title": "bytes on the wire"}
    assert marked == [
        ("answer-Wire", {"nbgrader": whole | answer}),
        ("check-Wire", {"nbgrader": whole | check, "labkit": about}),
    ], "each once, whatever else is handed to the check"
    path.write_text(EXERCISE.replace("class Wire:", "class Wire(Thing):").replace("verdict\n", "verdict  # look\n"))
    after = source.learner_notebook(path)
    assert [(cell.id, cell.metadata) for cell in after.cells if "nbgrader" in cell.metadata] == marked
    assert not any("nbgrader" in cell.metadata for cell in source.solved_notebook(path).cells)


def test_equal_cells_have_different_ids(folder):
    path = folder / "src" / "07_sample.py"
    path.write_text("# %%\nsame = 1\n\n# %%\nsame = 1\n")
    ids = [cell.id for cell in source.learner_notebook(path).cells]
    assert len(set(ids)) == len(ids) == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("### BEGIN SOLUTION\nx = 1", "without ### END"),
        ("x = 1\n### END SOLUTION", "where ### BEGIN"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "where ### END"),
        ("# BEGIN SOLUTION\nx = 1\n### END SOLUTION", "alone on its line"),
        ("x = 1  ### BEGIN SOLUTION", "alone on its line"),
    ],
)
def test_wrong_markers_are_named_with_their_cell(folder, body, says):
    path = folder / "src" / "07_sample.py"
    path.write_text(f"# %%\nfirst = 1\n\n# %%\n{body}\n")
    with pytest.raises(source.SourceError, match=f"07_sample.py: cell 2: .*{says}"):
        source.learner_notebook(path)


def test_a_semicolon_at_the_end_is_refused_because_nbval_shows_the_value(folder):
    path = folder / "src" / "07_sample.py"
    path.write_text("# %% [markdown]\n# Markdown may;\n\n# %%\nfirst = 1; second = 2\n\n# %%\nfirst;\n")
    with pytest.raises(source.SourceError, match=r"cell 3: .*semicolon"):
        source.learner_notebook(path)


def test_unknown_lab_lists_those_that_exist(folder):
    with pytest.raises(source.SourceError, match=r"no source 08_none .*07_sample"):
        source.find_labs(folder, ("08_none",))


def test_streams_cut_by_chance_are_joined():
    def stream(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    picture = nbformat.v4.new_output("display_data", data={"image/png": ""})
    pieces = [stream("stdout", "a"), stream("stdout", "b"), picture, stream("stdout", "c"), stream("stderr", "d")]
    kept = execute.joined(pieces)
    assert [output.get("text") for output in kept] == ["ab", None, "c", "d"]


def test_a_picture_takes_a_third_of_the_bytes_and_packing_again_changes_nothing():
    drawn = io.BytesIO()
    Image.fromarray(photo.load_photo()).save(drawn, "png")
    cell = nbformat.v4.new_code_cell("draw()")
    data = {"image/png": base64.b64encode(drawn.getvalue()).decode(), "text/plain": "a portrait"}
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    execute.strip(notebook)
    kept = cell.outputs[0].data["image/png"]
    assert len(kept) < len(data["image/png"]) / 3
    picture = Image.open(io.BytesIO(base64.b64decode(kept))).convert("RGB")
    assert picture.size == (512, 600)
    assert numpy.abs(numpy.asarray(picture).astype(int) - photo.load_photo()).mean() < 16
    assert execute.packed(kept) == kept


@pytest.mark.notebook
def test_build_gives_the_same_bytes_twice_and_notices_changes(folder, called):
    first = run_script("build", "--folder", folder)
    assert first.returncode == 0, first.stderr
    assert "1. Count the bytes" in first.stderr, "no progress was shown"
    solved = folder / "solved" / "07_sample.ipynb"
    text = solved.read_text()
    notebook = nbformat.reads(text, as_version=4)
    assert notebook.cells[4].outputs == [{"output_type": "stream", "name": "stdout", "text": "bytes 12 for 2\n"}]
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(word in text for word in ("papermill", "shell.execute_reply", str(folder), "execution_timing"))
    assert called(build.main, folder=folder).returncode == 0
    assert solved.read_text() == text
    assert called(build.main, folder=folder, check=True).returncode == 0

    path = folder / "src" / "07_sample.py"
    path.write_text(SAMPLE.replace("width = 4", "width = 8"))
    check = called(build.main, folder=folder, check=True)
    assert check.returncode == 1
    assert "solved/07_sample.ipynb is not what" in check.stdout and "make notebooks" in check.stdout
    assert "notebooks/07_sample.ipynb is not" in check.stdout, "the learner's notebook holds the answer, folded away"
    path.write_text(SAMPLE.replace("at last", "now"))
    assert "notebooks/07_sample.ipynb is not" in called(build.main, folder=folder, check=True).stdout


@pytest.mark.notebook
def test_build_refuses_outputs_that_name_this_machine(folder, called):
    (folder / "src" / "07_sample.py").write_text(f"# %%\nprint({str(ROOT)!r})\n")
    answer = called(build.main, folder=folder)
    assert answer.returncode == 1
    assert "cell 1 prints a folder of this machine" in answer.stderr
    assert not (folder / "solved" / "07_sample.ipynb").exists()


@pytest.mark.notebook
def test_execute_leaves_page_pictures_and_summary(folder, tmp_path):
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "07_09_of_an_earlier_run.png").write_bytes(b"")
    answer = run_script("run", "07_sample", "--folder", folder, "--out", out)
    assert answer.returncode == 0, answer.stderr
    assert "all well" in answer.stdout and "out/07_sample.html" in answer.stdout
    (picture,) = (out / "figures").iterdir()
    assert picture.name == "07_01_a_picture_at_last.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (out / "07_sample.html").read_text()
    assert "data:image/png;base64," in page and 'src="http' not in page
    assert nbformat.read(out / "07_sample.ipynb", as_version=4).cells[4].outputs
    assert "papermill" not in (out / "07_sample.ipynb").read_text()


@pytest.mark.notebook
def test_a_failing_cell_is_shown_and_what_ran_is_kept(folder, tmp_path, called):
    path = folder / "src" / "07_sample.py"
    path.write_text(SAMPLE.replace("rows * width", "rows / 0"))
    answer = called(run.main, "07_sample", folder=folder, out=tmp_path)
    assert answer.returncode == 1
    assert "ZeroDivisionError" in answer.stderr and "cell 3 of 5 (1. Count the bytes)" in answer.stderr
    assert "\x1b[" not in answer.stderr
    partial = nbformat.read(tmp_path / "07_sample.ipynb", as_version=4)
    assert any(output.output_type == "error" for cell in partial.cells for output in cell.get("outputs", []))
