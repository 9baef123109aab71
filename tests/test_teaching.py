"""For teachers: questions with one right answer each, plans that keep their time, and slides of each section."""

import json
import re

import pytest
import torch

from docs.book import plans, slides
from labkit.theory import fsdp

QUESTION = re.compile(r"^## Question (\d+)\n\n([^#]+?)\n\n((?:- .+\n)+)", re.MULTILINE)
CHOICE = re.compile(r"^- ([A-Z])\. (.+)$", re.MULTILINE)
KEY = re.compile(r"^## Question (\d+): ([A-D])\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
TAUGHT = re.compile(r'Lab (\w+), section (\d+), "([^"]+)"')
CITED = re.compile(r"\((\d\.\d): \*(.+?)\*\)", re.DOTALL)


@pytest.fixture(scope="module")
def questions(repository):
    """The choices of each question by letter."""
    found = QUESTION.findall((repository / "docs" / "questions.md").read_text())
    return {int(number): dict(CHOICE.findall(choices)) for number, _, choices in found}


@pytest.fixture(scope="module")
def keys(repository):
    """Letter and explanation of each question."""
    found = KEY.findall((repository / "docs" / "questions_key.md").read_text())
    return {int(number): (letter, text) for number, letter, text in found}


@pytest.fixture(scope="module")
def sections(repository):
    return plans.sections_of_labs(repository)


@pytest.fixture(scope="module")
def wrong_answers(repository):
    return plans.wrong_answers((repository / "docs" / "exercises.md").read_text())


def test_there_are_twenty_questions_with_four_choices_and_one_key_each(questions, keys):
    assert list(questions) == list(keys) == list(range(1, 21))
    for number, choices in questions.items():
        assert list(choices) == list("ABCD") and len(set(choices.values())) == 4, number
        explained = re.findall(r"^- ([A-D]): \S", keys[number][1], flags=re.MULTILINE)
        assert explained == [letter for letter in "ABCD" if letter != keys[number][0]], number
    letters = [letter for letter, _ in keys.values()]
    assert [letters.count(letter) for letter in "ABCD"] == [5, 5, 5, 5], "no letter is the better guess"


def test_each_question_is_taught_in_a_section_that_exists(keys, sections):
    labs = []
    for number, (_, text) in keys.items():
        lab, section, title = TAUGHT.match(text).groups()
        assert sections[lab, section].title == title, number
        labs.append(lab)
    assert sorted(set(labs)) == ["0", "1", "2"] and min(map(labs.count, labs)) >= 6


def test_wrong_choices_are_wrong_answers_that_a_check_has_seen(keys, wrong_answers):
    cited = 0
    for number, (_, text) in keys.items():
        for exercise, said in CITED.findall(text):
            assert (exercise, " ".join(said.split())) in wrong_answers, (number, exercise, said)
        cited += len(re.findall(r"^- [A-D]: .*\(\d\.\d: \*", text, flags=re.MULTILINE))
    assert cited >= 25, "of the 60 wrong choices"


def gradient_after_assignment():
    """Of the last pixel of rank 0, if the neighbour's part of its gradient replaces rank 0's own."""
    row = torch.zeros(1, 1, 8, requires_grad=True)
    outputs = torch.nn.functional.conv1d(row, torch.ones(1, 1, 3), padding=1)
    outputs[..., 4:].sum().backward()
    return int(row.grad[0, 0, 3])


def columns_before_the_strip():
    """Of the image, that a strip's features depend on: a layer that makes one column of four, and two blocks."""
    row = torch.zeros(1, 1, 80, requires_grad=True)
    features = torch.nn.functional.conv1d(row, torch.ones(1, 1, 4), stride=4)
    for _ in range(2):
        features = torch.nn.functional.conv1d(features, torch.ones(1, 1, 5), padding=2)
    features[..., 10:].sum().backward()
    return 40 - int(row.grad[0, 0].nonzero()[0])


def forward_ms(blocks, gather, compute):
    """Each gather begins when the one before has ended; each block computes once it is gathered."""
    end = 0
    for block in range(blocks):
        end = max(end, (block + 1) * gather) + compute
    return end


def test_numbers_in_the_key_are_those_that_one_computes(questions, keys):
    ranks = torch.tensor([[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    shared = fsdp.zero_bytes(10**9, 4, 2)
    right = {
        1: str(int(ranks.sum(0)[1])),
        7: str(min((1, 2, 4, 8), key=lambda n: 120 / n + 2 * (n - 1) * 10)),
        8: str(columns_before_the_strip()),
        10: str(gradient_after_assignment()),
        14: str(round(sum(shared.values()) / 1e9)),
        15: str(next(n for n in range(1, 9) if 16 * 8 / n + 8 * 6.4 <= 80)),
        20: f"{forward_ms(5, 30, 20)} ms",
    }
    assert {number: questions[number][keys[number][0]] for number in right} == right


@pytest.fixture(scope="module")
def all_plans(repository, sections):
    return plans.read_plans((repository / "docs" / "plans.md").read_text(), sections)


def test_no_plan_promises_more_than_its_time(all_plans, sections):
    assert [plan.minutes for plan in all_plans] == [90, 210, 420, 210, 210, 210]
    for plan in all_plans:
        taken = plan.minutes_until(sections)[-1] + plan.breaks
        assert 0.85 * plan.minutes < taken < 0.99 * plan.minutes, plan.title


def test_a_plans_minutes_are_those_of_its_labs(all_plans, sections):
    """A whole lab in a plan takes what its head says, and two minutes for each question."""
    day = all_plans[2]
    questions = sum(bool(number) for _, number, _ in day.steps)
    whole = sum(
        section.minutes + sum(section.exercises.values()) for (lab, _), section in sections.items() if lab in "012"
    )
    assert len(day.steps) == 3 + questions == sum(lab in "012" for lab, _ in sections)
    assert day.minutes_until(sections)[-1] == pytest.approx(5 + 2 * questions + whole)
    assert 255 < whole <= 3 * 90


def test_the_page_of_plans_has_a_row_for_each_step_that_sums_to_its_last_line(repository, all_plans):
    page = plans.plans_page((repository / "docs" / "plans.md").read_text(), repository, has_pdf=False)
    assert ".pdf" not in page
    pieces = page.split("\n## ")[1:]
    assert len(pieces) == len(all_plans)
    for plan, piece in zip(all_plans, pieces, strict=True):
        rows = plans.table_rows(piece)[1:]
        assert len(rows) == 1 + len(plan.steps)
        total = int(re.search(r"Together (\d+) of", piece)[1])
        assert abs(sum(int(row[-1]) for row in rows) - total) <= 1


def test_an_exercise_in_no_section_of_its_plan_is_named(repository, sections):
    text = (repository / "docs" / "plans.md").read_text().replace("| 1 4 |", "| 1 4 9 |", 1)
    with pytest.raises(ValueError, match=r"exercises \['9'\] of lab 0"):
        plans.read_plans(text, sections)


def test_the_room_has_a_question_for_each_section_and_a_misconception_for_each_exercise(
    repository, all_plans, wrong_answers
):
    asked, _, misconceptions = (repository / "docs" / "room.md").read_text().partition("## What people get wrong")
    steps = [step for plan in all_plans for step in plan.steps]
    rows = plans.table_rows(asked)[1:]
    assert {(lab, section) for lab, section, *_ in rows} == {(lab, number) for lab, number, _ in steps if number}
    assert len(rows) == len({row[2] for row in rows})
    believed = plans.table_rows(misconceptions)[1:]
    written = {f"{lab}.{exercise}" for lab, _, exercises in steps for exercise in exercises}
    assert sorted(row[0] for row in believed) == sorted(written)
    for number, _, said in believed:
        assert (number, said) in wrong_answers, number


def test_the_page_of_the_room_shows_the_wrong_answer_beside_the_belief(repository):
    read = {name: (repository / "docs" / f"{name}.md").read_text() for name in ("room", "exercises")}
    page = plans.room_page(read["room"], read["exercises"])
    row = next(line for line in page.splitlines() if line.startswith("| 2.4 |"))
    assert "`-         shard.grad /= ranks`" in row and row.endswith("not the mean |")


def test_slides_have_each_section_with_all_its_figures_its_takeaway_and_its_question(repository, tmp_path, sections):
    written = {path.stem: path.read_text() for path in slides.write_slides(repository, tmp_path)}
    assert len(written) == 7
    figures = 0
    for name, page in written.items():
        lab = name.partition("_")[0].removeprefix("0")
        shown = page.split("<section")[2:]
        titles = [section.title for (of, number), section in sections.items() if of == lab and number]
        assert len(shown) == len(titles), name
        notebook = json.loads((repository / "notebooks" / "solved" / f"{name}.ipynb").read_text())
        text = "".join("".join(cell["source"]) for cell in notebook["cells"])
        assert page.count('class="take"') == text.count("*Takeaway: "), name
        drawn = sum(
            "image/png" in each.get("data", {}) for cell in notebook["cells"] for each in cell.get("outputs", [])
        )
        assert page.count('<img src="data:image/png') == drawn and 'alt=""' not in page, name
        figures += drawn
        assert not re.search(r'(?:src|href)="(?!data:)', page), "no other file, no network"
    assert figures > 20
    assert "Which two collectives in turn leave what an all-reduce leaves" in written["00_ranks"].split("<section")[6]
    assert "model = DistributedDataParallel(" in written["00_ranks"].split("<section")[3]


def test_what_a_slide_shows_is_text_and_never_markup():
    said = slides.inline("**a** < b, `x[i] * y`, `2 * z` and [a link](http://x.y)")
    assert said == "<b>a</b> &lt; b, <code>x[i] * y</code>, <code>2 * z</code> and a link"
