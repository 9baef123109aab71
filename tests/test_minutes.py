"""Minutes of a notebook: by words, code, exercises, commits and runs; none is written by hand."""

import re

import pytest

from notebooks.tools import build, minutes, source
from notebooks.tools.source import find_labs

LABS = find_labs(build.FOLDER)
ONE_SITTING = {
    "00_ranks",
    "01_spatial_sharding",
    "02_fsdp_wrapping",
    "03_allgather_extensions",
    "04_compiler_bucketing",
    "04c_the_compiler_sends",
    "05_two_dimensions",
    "06_does_it_fit",
    "06b_how_long",
    "07_when_it_breaks",
    "08_beyond_one_machine",
}
"""Labs whose rest stands in a companion."""
WORDS = " ".join(["word"] * 130)
LINES = "x = 1\n" * 19
SAMPLE = f"""\
# %% [markdown]
# # A sample
#
# It takes {{core_minutes}} minutes, and {{optional_minutes}} for the rest.

# %% [markdown]
# ## 1. Bytes (core, {{minutes}} minutes)
#
# {WORDS}
#
# <details><summary>Hint</summary>
#
# {WORDS}
#
# </details>
#
# ### Exercise 1: count (••, {{minutes}} minutes)

# %%
def count(rows):
    ### BEGIN SOLUTION
    width = 4
    return rows * width
    ### END SOLUTION

# %% tags=["commit"]
mine = commit(bytes=None)

# %% tags=["claim"]
claim("it is so", plots.bars())

# %% [markdown]
# ### Look (optional, {{minutes}} minutes)
#
# {WORDS} {WORDS}

# %%
{LINES}labkit.run("all_reduce")

# %% [markdown]
# ## 2. More
#
# **optional, {{minutes}} minutes**
#
# {WORDS} {WORDS} {WORDS}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "07_sample.py"
    path.write_text(SAMPLE)
    return path


def test_words_outside_hints_code_exercises_commits_and_runs_take_their_time(path):
    parts = minutes.split_into_parts(source.read_source(path))
    spent = {part.heading.partition(" (")[0]: part.minutes - part.words / 130 for part in parts}
    assert spent == pytest.approx(
        # A line of given code, one of the commit and 1.5 for it; 20 lines and a run.
        {"": 0, "## 1. Bytes": 0, "### Exercise 1: count": 12 + 1 / 20 + 1 / 20 + 1.5, "### Look": 2, "## 2. More": 0}
    )
    assert [part.words // 130 for part in parts] == [0, 1, 0, 2, 3], "a hint does not count"
    assert [part.optional for part in parts] == [False, False, False, True, True]


def test_minutes_stand_where_their_marks_were(path):
    text = "\n".join(cell.source for cell in source.learner_notebook(path).cells)
    assert "It takes 15 minutes, and 7 for the rest." in text
    assert "## 1. Bytes (core, 15 minutes)" in text, "without what is optional"
    assert "### Exercise 1: count (••, 12 minutes)" in text
    assert "### Look (optional, 4 minutes)" in text and "**optional, 3 minutes**" in text
    solved = "\n".join(cell.source for cell in source.solved_notebook(path).cells)
    assert re.findall(r"\d+ minutes", solved) == re.findall(r"\d+ minutes", text)


def test_the_readme_gets_the_minutes_of_the_core(path):
    row = "| 7 | [A sample](notebooks/07_sample.ipynb) | {} | you will be able to |\n"
    assert build.with_minutes(row.format(0), [source.Lab(path)]) == row.format(15)


def test_the_readme_names_the_minutes_that_the_labs_take():
    assert build.stale_readme(LABS) == []


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_no_one_writes_minutes_by_hand(lab):
    headings = re.findall(r"^# (?:##|\*\*(?:core|optional)).*\d+ minutes.*", lab.source.read_text(), flags=re.MULTILINE)
    assert headings == []


@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.name in ONE_SITTING], ids=lambda lab: lab.name)
def test_a_core_is_one_sitting(lab):
    contents = source.read_source(lab.source)
    parts = minutes.split_into_parts(contents)
    core, optional = minutes.core_and_optional(parts)
    assert core <= 90 and optional == 0 and len(contents.cells) <= 70
    assert sum(part.words for part in parts) <= 2800 and sum(bool(part.exercise_minutes) for part in parts) <= 6
    given = [source.without_solutions(cell.source) for cell in contents.cells if cell.cell_type == "code"]
    assert max(sum(not line.startswith("%%") for line in text.splitlines() if line.strip()) for text in given) <= 25


@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.name in ONE_SITTING], ids=lambda lab: lab.name)
def test_the_minutes_of_the_sections_sum_to_those_of_the_head(lab):
    contents = source.read_source(lab.source)
    core, _ = minutes.core_and_optional(minutes.split_into_parts(contents))
    minutes.write_minutes(contents)
    text = "\n".join(cell.source for cell in contents.cells if cell.cell_type == "markdown")
    sections = re.findall(r"^## [^(\n]*\((?!optional)[^)\n]*?(\d+) minutes?\)", text, flags=re.MULTILINE)
    assert sum(map(int, sections)) == core
