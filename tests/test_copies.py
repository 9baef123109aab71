"""Copies of the labs: made, reset, and updated without losing anything that a learner wrote."""

import difflib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from fixture_messages import words

from labkit.__main__ import main
from labkit.errors import LabError, ParameterError
from labkit.runs.folder import workspace_folder
from labkit_course import copies, jupyter, lab_catalog
from labkit_course.merge import merge_notebooks
from notebooks.tools import source

VERSION_0_1_0 = Path(__file__).parent / "data" / "copies_0.1.0"
BEFORE = """\
# %% [markdown]
# # A lab

# %%
from labkit_course.checks import fsdp as checks

# %% [markdown]
# Some words about sharding, which are not quite right yet.

# %% [markdown]
# ### Exercise 1: bytes of each stage (•, 5 minutes)

# %%
def zero_bytes(parameters, ranks, stage):
    ### BEGIN SOLUTION
    return 4 * parameters
    ### END SOLUTION

# %%
checks.zero_bytes(zero_bytes)

# %%
print("an old experiment that goes")

# %% [markdown]
# ### Exercise 2: how many all-gathers? (••, 5 minutes)

# %%
def all_gathers(units):
    ### BEGIN SOLUTION
    return 2 * units
    ### END SOLUTION

# %%
checks.all_gathers(all_gathers)
"""
AFTER = (
    BEFORE.replace("not quite right yet", "right now")
    .replace('# %%\nprint("an old experiment that goes")\n', '# %%\nprint("something new, in its place")\n')
    .replace("def all_gathers(units):", "def all_gathers(units, reshard):")
    .replace("def zero_bytes(parameters, ranks, stage):", "def zero_bytes(parameters, ranks, stage=3):")
)


def texts(notebook):
    return [cell.source for cell in notebook.cells]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Writes a lab's source, builds the learner's notebook from it, and lets labkit take it for the course."""
    folder = tmp_path / "notebooks"
    (folder / "src").mkdir(parents=True)

    def build(text, name="02_sample"):
        path = folder / "src" / f"{name}.py"
        path.write_text(text)
        (folder / f"{name}.ipynb").write_text(source.as_text(source.learner_notebook(path)))
        lab_catalog._load_labs.cache_clear()
        return folder / f"{name}.ipynb"

    monkeypatch.setattr(lab_catalog, "NOTEBOOK_FOLDER", folder)
    yield build
    lab_catalog._load_labs.cache_clear()


def answer(path, begins, text, output=None):
    """What a learner does in JupyterLab: a cell's text changes, its id stays."""
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.source.startswith(begins))
    cell.source = text
    if output:
        cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text=output)], 3
    nbformat.write(notebook, path)


def test_every_lab_gets_a_copy_and_what_is_there_is_left_alone(course, tmp_path):
    course(BEFORE)
    mine = tmp_path / "my"
    assert [lab.name for lab in copies.make_copies(mine)] == ["02_sample"]
    (mine / "02_sample.ipynb").write_text("mine")
    course(BEFORE, "03_another")
    assert [lab.name for lab in copies.make_copies(mine)] == ["03_another"]
    assert (mine / "02_sample.ipynb").read_text() == "mine"
    assert sorted(path.name for path in mine.iterdir()) == [
        ".labkit",
        "02_sample.ipynb",
        "03_another.ipynb",
        "AGENTS.md",
    ]


def test_a_copy_whose_lab_has_another_name_now_stays_and_is_named(course, tmp_path):
    old, mine = course(BEFORE, "06_old"), tmp_path / "my"
    copies.make_copies(mine)
    answer(mine / old.name, "def all_gathers", "def all_gathers(units):\n    return 2 * units")
    written = (mine / old.name).read_text()
    old.unlink()
    course(AFTER, "06_new")
    said, problems = copies.update_copies(mine)
    assert said == ["06_new: a new copy", "06_old: no longer a lab; your copy stays as it is"] and not problems
    assert (mine / old.name).read_text() == written
    (mine / old.name).unlink()
    assert copies.update_copies(mine) == (["06_new: nothing new"], [])


def test_an_update_keeps_answers_and_brings_the_new_text(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    copy = mine / path.name
    written = "def all_gathers(units):\n    return 2 * units  # I think"
    answer(copy, "def all_gathers", written, "my output")
    answer(copy, "checks.zero_bytes", "checks.zero_bytes(zero_bytes)", "an output of an unchanged cell")
    notebook = nbformat.read(copy, as_version=4)
    notebook.cells.insert(4, nbformat.v4.new_code_cell("a_cell_of_my_own = 1"))  # below the words about sharding
    nbformat.write(notebook, copy)

    course(AFTER)
    ((said,), problems) = copies.update_copies(mine)
    assert not problems
    updated = nbformat.read(copy, as_version=4)
    nbformat.validate(updated)
    now = texts(updated)
    fresh = texts(nbformat.read(path, as_version=4))
    assert written in now and "a_cell_of_my_own = 1" in now
    assert "Some words about sharding, which are right now." in now
    assert "def zero_bytes(parameters, ranks, stage=3):\n    ...  # your code here" in now, "untouched: the new text"
    assert 'print("an old experiment that goes")' not in now
    place = now.index('print("something new, in its place")')
    assert now[place - 1] == fresh[fresh.index('print("something new, in its place")') - 1], "in its place"
    assert now[now.index("a_cell_of_my_own = 1") - 1] == "Some words about sharding, which are right now."
    outputs = {cell.source: cell.outputs for cell in updated.cells if cell.cell_type == "code"}
    assert outputs[written][0].text == "my output"
    assert outputs["checks.zero_bytes(zero_bytes)"][0].text == "an output of an unchanged cell"
    assert re.search(words("left: `def all_gathers(units):` … new … changed"), said)
    assert "+def all_gathers(units, reshard):" in said, "the new text can be read"
    assert "1 left" in said
    assert (mine / ".labkit" / "earlier" / path.name).exists()

    assert copies.update_copies(mine) == (["02_sample: nothing new"], [])
    course(AFTER.replace("# # A lab", "# # The lab"))
    copies.update_copies(mine)
    again = texts(nbformat.read(copy, as_version=4))
    assert written in again and "# The lab" in again, "the answer is found again by the id of its exercise"
    assert len(again) == len(now)


def test_an_update_that_was_cut_off_is_done_again_without_doubles(course, tmp_path, monkeypatch):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    answer(mine / path.name, "def all_gathers", "def all_gathers(units):\n    return 7")
    course(AFTER)
    before = (mine / ".labkit" / "pristine" / path.name).read_text()
    copies.update_copies(mine)
    done = (mine / path.name).read_text()
    (mine / ".labkit" / "pristine" / path.name).write_text(before)  # the last of its files was not written
    copies.update_copies(mine)
    assert texts(nbformat.read(mine / path.name, as_version=4)) == texts(nbformat.reads(done, as_version=4))


def test_a_cell_that_the_learner_removed_stays_away(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    notebook = nbformat.read(mine / path.name, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("Some words")]
    nbformat.write(notebook, mine / path.name)
    course(AFTER)
    (said,), _ = copies.update_copies(mine)
    assert "which are right now" not in "".join(texts(nbformat.read(mine / path.name, as_version=4)))
    assert re.search(words("left: … removed"), said)


def test_notes_of_the_learners_in_a_cell_of_text_outlive_every_change_of_it(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    noted = "Some words about sharding, which are not quite right yet. I do not think so."
    answer(mine / path.name, "Some words", noted)
    for change in ("right now", "right at last", "right for ever"):
        course(BEFORE.replace("not quite right yet", change))
        (said,), _ = copies.update_copies(mine)
        assert f"+Some words about sharding, which are {change}." in said
    now = texts(nbformat.read(mine / path.name, as_version=4))
    assert now.count(noted) == 1 and len(now) == len(texts(nbformat.read(path, as_version=4)))


@pytest.mark.filterwarnings("ignore:.*Non-unique cell id")
def test_a_cell_that_was_copied_with_its_id_is_kept_twice(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    notebook = json.loads((mine / path.name).read_text())
    place = next(number for number, cell in enumerate(notebook["cells"]) if cell["id"] == "answer-zero_bytes")
    notebook["cells"].insert(place + 1, {**notebook["cells"][place], "source": "again = 1"})
    (mine / path.name).write_text(json.dumps(notebook))
    course(AFTER)
    copies.update_copies(mine)
    merged = nbformat.read(mine / path.name, as_version=4)
    nbformat.validate(merged)
    assert "again = 1" in texts(merged) and len({cell.id for cell in merged.cells}) == len(merged.cells)


def test_an_id_of_the_learners_that_a_new_cell_has_is_changed():
    def notebook(**sources):
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text, id=id) for id, text in sources.items()])

    merged = merge_notebooks(
        notebook(old="a = b + c"), notebook(new="a = b + d"), notebook(old="a = b + c + 1", new="my own")
    ).notebook
    assert texts(merged) == ["a = b + c + 1", "my own"]
    assert merged.cells[0].id == "new" != merged.cells[1].id


def test_cells_without_ids_are_found_by_their_text(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    notebook = json.loads((mine / path.name).read_text())
    notebook["nbformat_minor"] = 4
    for cell in notebook["cells"]:
        del cell["id"]
    notebook["cells"].append({**notebook["cells"][-2], "source": "of_my_own = 1"})
    (mine / path.name).write_text(json.dumps(notebook))
    course(AFTER)
    copies.update_copies(mine)
    merged = nbformat.read(mine / path.name, as_version=4)
    nbformat.validate(merged)
    assert sorted(texts(merged)) == sorted([*texts(nbformat.read(path, as_version=4)), "of_my_own = 1"])
    assert len({cell.id for cell in merged.cells}) == len(merged.cells)


@pytest.mark.parametrize("broken", ['{"cells": [', "half a character"])
def test_a_broken_copy_is_named_with_a_fix_and_the_others_are_updated(course, tmp_path, broken):
    course(BEFORE, "01_first")
    course(BEFORE, "02_sample")
    mine = tmp_path / "my"
    copies.make_copies(mine)
    if broken == "half a character":
        content = json.loads((mine / "01_first.ipynb").read_text())
        content["cells"][0]["source"] = "\ud800"
        broken = json.dumps(content)
    (mine / "01_first.ipynb").write_text(broken)
    course(AFTER, "01_first")
    course(AFTER, "02_sample")
    (second,), (first,) = copies.update_copies(mine)
    assert re.search(words("01_first.ipynb … python -m labkit reset 01_first"), first)
    assert (mine / "01_first.ipynb").read_text() == broken
    assert "cells with a new text" in second


def test_a_copy_of_unknown_origin_is_left_alone(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    copies.make_copies(mine)
    (mine / ".labkit" / "pristine" / path.name).unlink()
    _, (said,) = copies.update_copies(mine)
    assert re.search(words("02_sample.ipynb … reset 02_sample"), said)


def test_a_reset_keeps_the_earlier_copy_each_time_in_one_folder_with_the_time_first(course, tmp_path):
    path, mine = course(BEFORE), tmp_path / "my"
    lab = lab_catalog.find_lab("02_sample")
    assert copies.reset_copy(lab, mine) is None
    kept = []
    for text in ("first", "second"):
        (mine / path.name).write_text(text)
        kept.append(copies.reset_copy(lab, mine))
    assert [path.read_text() for path in kept] == ["first", "second"]
    name = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d)?_02_sample\.ipynb"
    assert all(path.parent == mine / "earlier" and re.fullmatch(name, path.name) for path in kept)
    assert [each.name for each in mine.glob("*.ipynb")] == [path.name], "JupyterLab shows one notebook of this lab"
    assert (mine / path.name).read_text() == path.read_text()


def test_the_tutors_guide_is_renewed_until_the_learner_changes_or_removes_it(course, tmp_path, monkeypatch):
    course(BEFORE)
    mine, guide = tmp_path / "my", tmp_path / "guide.md"
    monkeypatch.setattr(copies, "TUTOR_GUIDE", guide)
    for text in ("first", "second"):
        guide.write_text(text)
        assert copies.update_copies(mine)[0][-1].startswith("02_sample: ")
        assert (mine / "AGENTS.md").read_text() == text
    (mine / "AGENTS.md").write_text("rules of my own")
    guide.write_text("third")
    assert copies.update_copies(mine)[0][-1] == "AGENTS.md: left as you have it"
    copies.make_copies(mine)
    assert (mine / "AGENTS.md").read_text() == "rules of my own"
    (mine / "AGENTS.md").unlink()
    copies.update_copies(mine)
    assert not (mine / "AGENTS.md").exists(), "what the learner removed stays away"


@pytest.mark.parametrize("gone", [True, False])
def test_a_guide_that_was_there_before_the_copies_is_the_learners(course, tmp_path, gone):
    course(BEFORE)
    mine = tmp_path / "my"
    mine.mkdir()
    (mine / "AGENTS.md").write_text("rules of my own")
    copies.make_copies(mine)
    if gone:
        shutil.rmtree(mine / ".labkit")
    copies.make_copies(mine)
    assert (mine / "AGENTS.md").read_text() == "rules of my own"


def test_the_tutors_guide_is_short_and_names_only_what_there_is(repository):
    text = copies.TUTOR_GUIDE.read_text()
    assert len(text.splitlines()) <= 60
    named = re.findall(r"`((?:notebooks|tests|docs|labkit)/[\w/.]+)`", text)
    assert len(named) >= 6 and [name for name in named if not (repository / name).exists()] == []


def test_a_folder_that_cannot_be_written_in_is_an_error_with_a_fix(course, tmp_path):
    course(BEFORE)
    (tmp_path / "my").write_text("a file")
    with pytest.raises(LabError, match=words("my: … --folder")):
        copies.make_copies(tmp_path / "my")


def test_nothing_that_a_learner_wrote_is_ever_lost(course):
    """Whatever is edited, added, removed and moved on both sides, over two updates in a row."""
    notes = [f"# %%\nstep_{number} = compute({number})  # line {number}\n" for number in range(12)]
    path = course(BEFORE + "".join(notes))
    base = nbformat.read(path, as_version=4)
    for seed in range(60):
        chance = random.Random(seed)
        mine, known = edited(base, chance, "mine"), base
        wrote = {text for text in texts(mine) if text not in texts(base)}
        for release in ("new", "newer"):
            new = edited(known, chance, release)
            mine = merge_notebooks(known, new, mine).notebook
            nbformat.validate(mine)
            now = texts(mine)
            assert wrote <= set(now), f"seed {seed}: lost {difflib.context_diff(sorted(wrote), sorted(now))}"
            assert len({cell.id for cell in mine.cells}) == len(mine.cells)
            known = new


def edited(notebook, chance, mark):
    """Another notebook: some cells with another text, some gone, some new, some elsewhere."""
    cells = nbformat.from_dict(json.loads(json.dumps(notebook.cells)))
    for number, cell in enumerate(cells):
        if chance.random() < 0.2:
            cell.source += f"\n# {mark} {number}"
            if mark != "mine" and not re.match("answer-|check-", cell.id):
                cell.id = f"{mark}-{number}-{chance.randrange(10**6)}"
    cells = [cell for cell in cells if chance.random() > 0.1]
    for number in range(chance.randrange(4)):
        new = nbformat.v4.new_code_cell(f"{mark}_{number} = {chance.random()}")
        cells.insert(chance.randrange(len(cells) + 1), new)
    if chance.random() < 0.3:
        cells.insert(0, cells.pop(chance.randrange(len(cells))))
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize("name", ["02_fsdp_wrapping", "2", "02", "fsdp", "02_fsdp_wrapping.ipynb"])
def test_a_lab_is_found_by_its_name_its_number_or_its_short_name(name):
    assert lab_catalog.find_lab(name).name == "02_fsdp_wrapping"


@pytest.mark.parametrize("name", ["00b_ranks_at_work", "0b", "00b", "collectives_at_work"])
def test_a_companion_has_its_labs_number_and_a_letter(name):
    assert lab_catalog.find_lab(name).name == "00b_ranks_at_work"
    assert [each.number for each in lab_catalog.find_lab(name).exercises] == [f"0b.{number}" for number in range(1, 6)]


@pytest.mark.parametrize("name", ["9", "fsd", "", "../02_fsdp_wrapping"])
def test_an_unknown_lab_lists_those_that_exist(name):
    with pytest.raises(ParameterError, match=words("… 00_ranks, 00b_ranks_at_work, 01_spatial_sharding, ")):
        lab_catalog.find_lab(name)


def test_jupyterlab_gets_the_copies_alone_and_no_settings_of_the_user_change(tmp_path, monkeypatch):
    settings = tmp_path / "settings"
    settings.mkdir()
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(settings))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/somewhere/else")
    environment = jupyter.prepare_environment(tmp_path / "my")
    ours = tmp_path / "my" / ".labkit" / "jupyter"
    assert environment["JUPYTER_CONFIG_PATH"].split(os.pathsep) == [str(ours), "/somewhere/else"]
    assert environment["LABKIT_RUNS"] == os.environ["LABKIT_RUNS"]
    page = json.loads((ours / "labconfig" / "page_config.json").read_text())
    assert page == {"disabledExtensions": {jupyter.ANNOUNCEMENTS_PLUGIN: True}}
    words = jupyter.jupyter_command(tmp_path / "my", "00_ranks.ipynb", browser=False, more=("--port=9",))
    assert (
        f"--ServerApp.root_dir={tmp_path / 'my'}" in words and "--LabApp.default_url=/lab/tree/00_ranks.ipynb" in words
    )
    assert "--no-browser" in words and words[-1] == "--port=9"
    assert "--ServerApp.ip=127.0.0.1" in words
    words = jupyter.jupyter_command(tmp_path / "my", "00_ranks.ipynb", browser=False, more=("--ip=0.0.0.0",))
    assert [word for word in words if "ip=" in word] == ["--ip=0.0.0.0"], "JupyterLab takes one"
    assert list(settings.iterdir()) == []


def test_in_a_checkout_copies_lie_in_it_wherever_one_works(repository, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert copies.default_copies_folder() == repository / "my" and workspace_folder() == repository


def test_copies_are_ignored_by_git(repository):
    if not (repository / ".git").exists():
        pytest.skip("no clone: nothing to ignore")
    names = ["my/00_ranks.ipynb", "my/progress.json"]
    asked = subprocess.run(["git", "check-ignore", *names], cwd=repository, capture_output=True, text=True)
    assert asked.stdout.split() == names


def test_commands_say_what_they_did(course, tmp_path, capsys):
    course(BEFORE)
    mine = str(tmp_path / "my")
    assert main(["reset", "2", "--folder", mine]) == 0
    assert main(["reset", "2", "--folder", mine]) == 0
    kept = r"made .*02_sample.ipynb; the earlier one is .*my/earlier/20.*_02_sample\.ipynb"
    assert re.search(kept, capsys.readouterr().out)
    course(AFTER)
    assert main(["update", "--folder", mine]) == 0
    assert "02_sample: 5 cells with a new text, 1 new, 1 removed, 0 left as you have them" in capsys.readouterr().out
    (tmp_path / "my" / "02_sample.ipynb").write_text("")
    course(BEFORE)
    assert main(["update", "--folder", mine]) == 1
    assert "02_sample: left as it is. " in capsys.readouterr().err
    assert main(["reset", "nine", "--folder", mine]) == 2


def test_the_command_that_opens_the_lab_says_what_is_new(course, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(jupyter, "exec_jupyter", lambda *arguments, **options: started.append((arguments, options)))
    mine = tmp_path / "my"
    for text, said in ((BEFORE, "made "), (BEFORE, ""), (AFTER, "There is something new in 02_sample: `python -m")):
        course(text)
        assert main(["lab", "2", "--no-browser", "--folder", str(mine), "--jupyter-options=--port=0"]) == 0
        assert capsys.readouterr().out.startswith(said)
    assert started[0] == ((mine, "02_sample.ipynb"), {"browser": False, "more": ("--port=0",)})


def test_without_jupyterlab_the_command_says_what_to_install(course, tmp_path, monkeypatch, capsys):
    course(BEFORE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["lab", "2", "--folder", str(tmp_path / "my")]) == 1
    assert "pip install 'labkit[notebook]'" in capsys.readouterr().err


def old_copies(mine):
    """Copies as a learner of version 0.1.0 has them: some answers, and a cell of their own at the end. By lab, both."""
    pristine = mine / ".labkit" / "pristine"
    pristine.mkdir(parents=True)
    answers = json.loads((VERSION_0_1_0 / "answers.json").read_text())
    for lab, written in answers.items():
        base = VERSION_0_1_0 / f"{lab}.ipynb"
        (pristine / base.name).write_bytes(base.read_bytes())
        notebook = nbformat.read(base, as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell("", id="own"))
        for cell, text in written.items():
            (place,) = (each for each in notebook.cells if each.id == cell)
            place.source = text
        nbformat.write(notebook, mine / base.name)
    return answers


def test_copies_of_version_0_1_0_take_todays_labs_and_keep_what_was_written(repository, tmp_path, monkeypatch, capsys):
    today, mine = tmp_path / "notebooks", tmp_path / "my"
    today.mkdir()
    sources = {path.stem: source.learner_notebook(path) for path in (repository / "notebooks" / "src").glob("*.py")}
    for name, notebook in sources.items():
        (today / f"{name}.ipynb").write_text(source.as_text(notebook))
    monkeypatch.setattr(lab_catalog, "NOTEBOOK_FOLDER", today)
    lab_catalog._load_labs.cache_clear()
    try:
        answers = old_copies(mine)
        assert main(["update", "--folder", str(mine)]) == 0
    finally:
        lab_catalog._load_labs.cache_clear()
    said = capsys.readouterr().out
    for lab, written in answers.items():
        assert f"{lab}: " in said and f"{lab}: nothing new" not in said
        cells = texts(nbformat.read(mine / f"{lab}.ipynb", as_version=4))
        assert set(written.values()) <= set(cells)
        assert source.install_cell({}).source in cells, "which copies of that time did not have"
        prose = [cell.source for cell in sources[lab].cells if cell.cell_type == "markdown"]
        assert set(prose) <= set(cells)
