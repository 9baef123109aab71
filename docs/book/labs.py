"""A solved lab as the book shows it: each exercise as the learner gets it, and the answer folded below it."""

import copy
import json
import re
from pathlib import Path
from typing import Any

from docs.book.terms import link_terms

PLACEHOLDER = "...  # your code here"
ANSWER_BELOW = "<details><summary>An answer"
INSTALL_ID = "install-labkit"
CAPTION = re.compile(r"\*(?!\*)(.+?)\*(?!\*)", re.DOTALL)


class LabError(Exception):
    """A lab's two notebooks do not belong together."""


def lab_of_the_book(learner_path: Path, solved_path: Path, terms: list[str]) -> dict[str, Any]:
    """The notebook that the book shows of a lab.

    Raises:
        LabError: the learner's notebook and the solved one have not been built from one source.
    """
    learner, solved = (json.loads(path.read_text()) for path in (learner_path, solved_path))
    for_learners = [cell for cell in learner["cells"] if cell.get("id") != INSTALL_ID]
    given = [cell for cell in for_learners if not text_of(cell).startswith(ANSWER_BELOW)]
    if [cell["cell_type"] for cell in given] != [cell["cell_type"] for cell in solved["cells"]]:
        raise LabError(f"{learner_path} and {solved_path} differ: run make notebooks")
    cells: list[dict[str, Any]] = []
    linked: set[str] = set()
    for index, (open_cell, cell) in enumerate(zip(given, solved["cells"], strict=True)):
        shown, text = copy.deepcopy(cell), text_of(cell)
        shown["source"] = text
        tags = cell["metadata"].get("tags", [])
        shown["metadata"] = {}
        if cell["cell_type"] == "markdown":
            shown["source"] = link_terms(text, terms, linked)
        else:
            shown["outputs"] = [output for output in cell["outputs"] if not is_empty(output)]
            if "claim" in tags:
                fold(shown, "Show what holds these sentences against the numbers", "Hide it")
            elif PLACEHOLDER in text_of(open_cell) or {"commit", "look"} & set(tags):
                cells.append(as_given(open_cell))
                fold(shown, "Show the answer", "Hide the answer")
                shown["source"] = text if PLACEHOLDER in text_of(open_cell) else answer_alone(text_of(open_cell), text)
            describe_figures(shown, solved["cells"][index + 1 : index + 3])
        cells.append(shown)
    # Cells may begin with %%torchrun.
    metadata = solved["metadata"] | {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_of(cell: dict[str, Any]) -> str:
    """The text of a cell, which a file may hold as lines."""
    return "".join(cell["source"])


def is_empty(output: dict[str, Any]) -> bool:
    """Whether an output shows nothing, such as a progress line that was taken away."""
    return output["output_type"] == "display_data" and not any("".join(text) for text in output["data"].values())


def as_given(cell: dict[str, Any]) -> dict[str, Any]:
    """An exercise's cell as the learner gets it."""
    return {
        "cell_type": "code",
        "id": f"{cell['id'][:50]}-given",
        "metadata": {},
        "source": text_of(cell),
        "outputs": [],
        "execution_count": None,
    }


def answer_alone(given: str, answered: str) -> str:
    """The lines of a commitment that the learner does not get."""
    return answered.removeprefix(given).lstrip("\n")


def fold(cell: dict[str, Any], show: str, hide: str) -> None:
    """Fold the code of a cell, and leave its output in sight."""
    cell["metadata"]["tags"] = ["hide-input"]
    cell["metadata"]["mystnb"] = {"code_prompt_show": show, "code_prompt_hide": hide}


def describe_figures(cell: dict[str, Any], following: list[dict[str, Any]]) -> None:
    """Give a figure the caption below it as its text, for those who hear the page."""
    if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
        captions = [CAPTION.match(text_of(each)) for each in following if each["cell_type"] == "markdown"]
        caption = next((match[1] for match in captions if match), "The figure that the code above draws")
        cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": plain(caption)}


def plain(markdown: str) -> str:
    """A caption without marks and line breaks."""
    return " ".join(re.sub(r"[*`\[\]\"<>]", "", markdown).split())
