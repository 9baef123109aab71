"""The book's pages before Sphinx sees them, and a README of one screen; browser/test_book_pages.py builds the book."""

import ast
import json
import math
import re

import pytest

import labkit
from docs.book import api, labs, messages, pages, terms
from labkit.theory import collectives, ddp, fsdp, spatial, two_dim


@pytest.fixture(scope="module")
def told(repository):
    return messages.read_messages(repository)


def test_the_readme_is_one_screen_with_the_commands_that_do_everything(repository):
    text = (repository / "README.md").read_text()
    assert len(text.encode()) <= 4096
    assert all(f"\n| `make {target}` |" in text for target in ("run", "test", "book"))
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert len(links) > 20 and [link for link in links if not (repository / link).exists()] == []


def test_learners_are_not_led_to_what_wrong_answers_are_told(repository):
    places = [repository / "README.md", *repository.glob("docs/*.md"), *repository.glob("notebooks/src/*.py")]
    named = {path.name for path in places if "exercises.md" in path.read_text()}
    assert named == {"teachers.md"}


def test_every_page_of_docs_stands_in_the_contents(repository):
    listed = {name for names in pages.CONTENTS.values() for name in names}
    assert {path.stem for path in repository.glob("docs/*.md")} - listed == {"index"}


def words(text):
    return set(re.findall(r"[a-z_]{2,}", text.lower()))


def wrong_program():
    labkit.run("no_program")


def wrong_parameter():
    labkit.run("fsdp_wrap", nproc=2, modle="toy")


def wrong_width():
    spatial.check_strips(510, 4, (1, 1))


def wrong_stage():
    fsdp.zero_bytes(1, 1, 5)


def wrong_run():
    labkit.load("no/such/folder")


@pytest.mark.parametrize("provoke", [wrong_program, wrong_parameter, wrong_width, wrong_stage, wrong_run])
def test_a_message_as_it_is_raised_is_found_by_its_words(provoke, told):
    with pytest.raises((labkit.LabError, ValueError, OSError)) as caught:
        provoke()
    said = str(caught.value)
    best = max(told, key=lambda message: len(words(message.text) & words(said)) / (3 + len(words(message.text))))
    # Every fixed word of the entry was said, in this order; the rest are values.
    pattern = re.escape(best.text).replace(messages.VALUE, ".*").replace(r"\ ", r"\s+")
    assert len(words(best.text)) >= 3 and re.search(pattern, said, re.DOTALL), (said, best)


def test_every_error_that_is_raised_with_words_of_its_own_is_told(repository, told):
    """Asked of the code in another way than the page asks: by the longest piece of text in each raise."""
    everything = "\n".join(message.text for message in told)
    missing, count = [], 0
    for folder in messages.FOLDERS:
        for path in (repository / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                    continue
                pieces = [each.value for each in ast.walk(node.exc.args[0]) if isinstance(each, ast.Constant)]
                longest = " ".join(
                    max((piece for piece in pieces if isinstance(piece, str)), key=len, default="").split()
                )
                if len(re.findall(r"[A-Za-z]{2,}", longest)) >= 3:
                    count += 1
                    missing += [f"{path}:{node.lineno} {longest}"] * (longest not in everything)
    assert count > 200 and missing == []


def test_names_in_a_message_are_followed_to_what_they_say(tmp_path):
    folder = tmp_path / "labkit"
    folder.mkdir()
    (folder / "wide.py").write_text(
        "WORDS = 'take a narrower image'\n"
        "def check(width, ranks):\n"
        "    rule = f'{ranks} ranks cannot share {width}' if ranks else 'nobody is there'\n"
        "    raise ValueError(f'{rule}: {WORDS}')\n"
    )
    found = {message.text: message for message in messages.read_messages(tmp_path)}
    assert set(found) == {"… ranks cannot share …: take a narrower image", "nobody is there: take a narrower image"}
    assert {(each.raised, each.file, each.symptom) for each in found.values()} == {
        ("ValueError", "labkit/wide.py", "refused")
    }


def test_no_hint_of_a_check_is_told(repository, told):
    """Hints give answers away: those that a ``hint=`` holds, and those of constants."""
    hints = []
    for path in (repository / "labkit_course/checks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                hints += [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "HINT" in node.targets[0].id:
                hints += [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
    long = {" ".join(hint.split()) for hint in hints if isinstance(hint, str) and len(hint.split()) >= 5}
    assert len(long) > 20
    assert [(hint, message) for hint in long for message in told if hint in message.text] == []


def notebook(*cells):
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def code(source, outputs=(), **metadata):
    outputs = list(outputs)
    return {
        "cell_type": "code",
        "id": "a",
        "metadata": metadata,
        "source": source,
        "outputs": outputs,
        "execution_count": None,
    }


def prose(source):
    return {"cell_type": "markdown", "id": "b", "metadata": {}, "source": source}


@pytest.fixture
def lab(tmp_path):
    """A lab with a commitment, an exercise and a figure, as the book shows it."""
    figure = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "", "text/plain": "<Figure>"}}
    nothing = {"output_type": "display_data", "metadata": {}, "data": {"text/html": []}}
    learner = notebook(
        prose("A rank sends a *shard*. A rank waits."),
        code("mine = commit(x=None)", tags=["commit"]),
        code("def f():\n    ...  # your code here"),
        prose("<details><summary>An answer (try the check first)</summary>\n\n</details>"),
        code("plot()"),
        prose("*It shrinks with* N."),
    )
    solved = notebook(
        prose("A rank sends a *shard*. A rank waits."),
        code("mine = commit(x=None)\nmine = commit(x=3)", tags=["commit"]),
        code("def f():\n    return 1"),
        code("plot()", [nothing, figure]),
        prose("*It shrinks with* N."),
    )
    for name, cells in (("learner", learner), ("solved", solved)):
        (tmp_path / name).write_text(json.dumps(cells))
    return labs.lab_of_the_book(tmp_path / "learner", tmp_path / "solved", ["shard", "rank"])["cells"]


def test_an_answer_is_folded_below_the_exercise_as_learners_get_it(lab):
    texts = [cell["source"] for cell in lab]
    assert texts[1:5] == [
        "mine = commit(x=None)",
        "mine = commit(x=3)",
        "def f():\n    ...  # your code here",
        "def f():\n    return 1",
    ]
    assert ["hide-input" in cell["metadata"].get("tags", []) for cell in lab] == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert not any("An answer (try" in text for text in texts)


def test_outputs_that_show_nothing_are_left_out_and_figures_are_described(lab):
    drawn = lab[5]
    assert len(drawn["outputs"]) == 1
    assert drawn["metadata"]["mystnb"]["image"] == {"alt": "It shrinks with"}


def test_a_term_links_to_the_glossary_where_it_comes_first(lab):
    assert lab[0]["source"] == "A {term}`rank <rank>` sends a *{term}`shard <shard>`*. A rank waits."


def test_labs_of_two_builds_are_refused(tmp_path):
    (tmp_path / "learner").write_text(json.dumps(notebook(prose("one"))))
    (tmp_path / "solved").write_text(json.dumps(notebook(code("two"))))
    with pytest.raises(labs.LabError, match="run make notebooks"):
        labs.lab_of_the_book(tmp_path / "learner", tmp_path / "solved", [])


@pytest.mark.parametrize(
    "text",
    [
        "`shard`",
        "# A shard",
        "[a shard](x.md)",
        "```\na shard\n```",
        "<summary>shard</summary>",
        "shard_count",
        "resharding",
    ],
)
def test_no_term_is_linked_inside_code_headings_links_and_names(text):
    assert terms.link_terms(text, ["shard"], set()) == text


def test_the_glossary_has_the_words_that_the_labs_print_in_bold(repository):
    known = terms.read_terms((repository / "docs/glossary.md").read_text())
    assert len(known) == len(set(known)) > 60
    text = "\n".join(path.read_text() for path in (repository / "notebooks/src").glob("0[0-5]_*.py"))
    bold = {term for term in re.findall(r"\*\*([a-z][a-z-]+)\*\*", text)}
    unknown = [word for word in bold if not any(terms.pattern_of(term).fullmatch(word) for term in known)]
    # Common words in bold, and words of one exercise.
    assert len(unknown) < len(bold) / 2, sorted(unknown)


def test_docstrings_become_markdown_that_hides_nothing():
    text = api.as_markdown(
        "Do it for runs/<id>.\n\n    shown = code\n\nArgs:\n    size: in bytes,\n        all of it.\n    *rest: more."
    )
    assert r"runs/\<id>" in text and "    shown = code" in text
    assert "**Args**" in text and "- `size`: in bytes,\n  all of it." in text and "- `*rest`: more." in text


def test_every_public_name_is_in_the_api(repository):
    text = "\n".join(api.pages(repository).values())
    for name in ("run", "check", "compare", "load", "simulate", "plan", "submit"):
        assert re.search(rf"\{{py:function\}} {name}\(", text), name
    for name in ("RunResult", "Emulated", "RankFailed"):
        assert re.search(rf"\{{py:class\}} {name}\b", text), name


def test_the_formulas_of_the_page_are_those_of_the_code():
    ranks, parameters, size = 8, 7e9, 2
    assert fsdp.zero_bytes(int(parameters), ranks, 2)["optimizer"] == 8 * parameters / ranks
    assert sum(fsdp.zero_bytes(int(parameters), ranks, 2).values()) == 4 * parameters + 12 * parameters / ranks
    assert sum(fsdp.wire_bytes(size * parameters, ranks).values()) == pytest.approx(3 * 7 / 8 * size * parameters)
    assert fsdp.tokens_to_hide(4e14, 5e10, ranks) == pytest.approx(7 / 8 * size * 4e14 / 5e10 / 2)
    assert collectives.collective_wire_bytes("all_reduce", 80, ranks) == 2 * 7 / 8 * 80
    assert ddp.smallest_bucket_bytes(1e6, 1.0, 1e-3, 1e-7) == pytest.approx(1e6 * 1e-3 / (1.0 - 1e6 * 1e-7))
    share = two_dim.message_share(4096, ranks, 4e14, 5e10, size)
    assert math.isclose(share, 7 * size * 4e14 / 5e10 / (3 * 4096))
