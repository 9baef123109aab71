"""Every exercise: its right answer passes, and three wrong ones or more fail in different words, as docs/ shows.

Run this file as a script to write the table anew: ``python tests/test_exercises.py``.
"""

import ast
import difflib
import functools
import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
from answers import BEGIN, END, solution

from labkit_course import lab_catalog
from notebooks.tools.source import without_solutions

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "exercises.md"
SHORT = 6
"""Lines of an answer that are shown whole."""
LABS = [path.stem for path in Path(__file__).with_name("answers").glob("[!_]*.py")]
EXERCISES = [each for lab in LABS for each in importlib.import_module(f"answers.{lab}").EXERCISES]
EXERCISES.sort(key=lambda exercise: (exercise.number.split(".")[0], int(exercise.number.split(".")[1])))
DAILY = 2
"""So many wrong answers to each exercise are tried daily, and the others in the long tier."""
WRONG = [
    pytest.param(each, said, id=f"{each.number}: {said}", marks=[pytest.mark.long] * (place >= DAILY))
    for each in EXERCISES
    for place, said in enumerate(each.wrong)
]


def source_of(exercise):
    """The lab's imports, and the head and text of the function that the learner completes."""
    lab = exercise.number.split(".")[0]
    imports, functions = read(lab if re.match(r"\d\d", lab) else f"0{lab}")
    return imports, functions[exercise.function]


@functools.cache
def read(lab):
    """A lab's imports, and the text of each of its functions."""
    (path,) = (ROOT / "notebooks" / "src").glob(f"{lab}_*.py")
    text = path.read_text().replace("%%torchrun", "# %%torchrun")
    nodes = ast.parse(text).body
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    texts = {node.name: ast.get_source_segment(text, node) for node in functions}
    # the last mark is a comment behind the last statement, which ast leaves out
    whole = {
        name: f"{each}\n    {END}" if each.count(BEGIN) > each.count(END) else each for name, each in texts.items()
    }
    return "\n".join(imports) + "\n\n", whole


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, by default the notebook's own, with the head that the notebook has."""

    def made(exercise, body=None):
        imports, text = source_of(exercise)
        head = text.partition(BEGIN)[0].rstrip()
        return answer_to(head, text.removeprefix(head) if body is None else body, imports)

    return made


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)
def test_the_right_answer_passes_and_an_empty_one_is_not_attempted(exercise, answer):
    verdict = exercise.check(answer(exercise))
    assert verdict.ok, verdict
    empty = without_solutions(source_of(exercise)[1])
    head = source_of(exercise)[1].partition(BEGIN)[0].rstrip()
    assert exercise.check(answer(exercise, empty.removeprefix(head))).state == "not attempted"


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(("exercise", "said"), WRONG)
def test_a_wrong_answer_fails_in_its_own_words(exercise, said, answer):
    verdict = exercise.check(answer(exercise, exercise.wrong[said]))
    assert verdict.state == "wrong", verdict
    assert verdict.detail.startswith(said)


def test_there_are_three_wrong_answers_to_each_with_three_messages():
    for exercise in EXERCISES:
        assert len(exercise.wrong) >= 3, exercise.number
        others = [(one, other) for one in exercise.wrong for other in exercise.wrong if one != other]
        assert not any(one.startswith(other) for one, other in others), exercise.number


def test_the_notebooks_name_the_same_exercises():
    marked = {lab.key: [each.number for each in lab.exercises] for lab in lab_catalog.all_labs()}
    assert marked == {lab: numbers_of(lab) for lab in LABS}
    functions = {(each.number, each.function) for each in EXERCISES}
    for exercise in (each for lab in lab_catalog.all_labs() for each in lab.exercises):
        # an exercise with two functions counts under the first, which its wrong answers may leave alone
        names = {exercise.name, exercise.name.replace("encode", "decode")}
        assert any((exercise.number, name) in functions for name in names), exercise


def numbers_of(lab):
    """Each number once, in order."""
    exercises = importlib.import_module(f"answers.{lab}").EXERCISES
    return list(dict.fromkeys(each.number for each in exercises))


def test_the_table_in_docs_is_up_to_date():
    assert TABLE.read_text() == table(), "run: python tests/test_exercises.py"


KINDS = {
    "right on one number of ranks": r"^right on ",
    "right values, more traffic": r"sends? |were sent|made by|was used|right, but [\d,]+ bytes",
    "right values, another dtype": r"torch\.(float|bfloat|int)",
}
"""What an answer on ranks may get wrong although its numbers are right somewhere, by how its verdict begins."""


def answers_on_ranks():
    """The exercises with an answer that is right on one number of ranks, and for each kind what the verdict says."""
    found = {}
    for exercise in EXERCISES:
        said = {kind: next((each for each in exercise.wrong if re.search(p, each)), "–") for kind, p in KINDS.items()}
        if said["right on one number of ranks"] != "–":
            found[f"{exercise.number} `{exercise.function}`"] = list(said.values())
    return found


def test_exercises_on_ranks_have_an_answer_that_is_right_on_one_number_of_ranks():
    assert {name.split()[0] for name in answers_on_ranks()} == {
        *(
            "0.1",
            "0.2",
            "0.3",
            "0.4",
            "0b.1",
            "0b.2",
            "1.2",
            "1.3",
            "1.4",
            "1b.4",
            "1b.5",
            "2.2",
            "2.3",
            "2.4",
            "2.5",
            "2b.3",
            "2b.5",
            "3.1",
            "3.2",
        ),
        *("3b.4", "3b.6", "4.3", "4.6", "4b.1", "5.2", "5.3", "7b.3", "7b.4"),
    }


def table():
    """Exercise x wrong answer x first words, as Markdown."""
    lines = [
        "# Wrong answers, and what the labs say",
        "",
        "Written by tests/test_exercises.py, which also holds that each right answer passes. For each exercise: wrong",
        "answers that were handed to its check, and the first words of the verdict. A hint and the expected value open",
        "below these, on request.",
    ]
    lines += ["", "Answers on real ranks are asked on two numbers of ranks, and their messages are counted.", ""]
    lines += [f"| exercise | {' | '.join(KINDS)} |", "|---|---|---|---|"]
    for name, said in answers_on_ranks().items():
        lines.append(f"| {name} | {' | '.join(map(in_cell, said))} |")
    for exercise in EXERCISES:
        lines += [
            "",
            f"## {exercise.number} `{exercise.function}`",
            "",
            "| wrong answer | the verdict begins |",
            "|---|---|",
        ]
        lines += [f"| {cell(exercise, body)} | {in_cell(said)} |" for said, body in exercise.wrong.items()]
    return "\n".join(lines) + "\n"


def cell(exercise, body):
    """Code in a cell of a table; of a long body, what differs from the right one."""
    lines = textwrap.dedent(body).strip().splitlines()
    right = solution(source_of(exercise)[1]).strip().splitlines()
    note = ""
    if len(lines) > SHORT:
        changes = [line for line in difflib.ndiff(right, lines) if line[0] in "+-" and line[1:].strip()]
        if len(changes) < len(lines):
            lines, note = changes, "the right answer, with "
    return note + "<br>".join(f"`{line}`".replace("|", "\\|") for line in lines if line.strip())


def in_cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    TABLE.write_text(table())
    print(f"wrote {TABLE}: {len(EXERCISES)} exercises, {sum(len(each.wrong) for each in EXERCISES)} wrong answers")
