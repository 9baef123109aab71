"""Wrong answers to the labs' exercises, and what their checks say. One file a lab, each with its ``EXERCISES``.

tests/test_exercises.py hands every one of them to its check and writes the table docs/exercises.md.
"""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit_course.checks.judge import Verdict


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab. Its head and its right answer stand in the lab's source."""

    number: str
    """The lab's and its own, such as "1.2"."""
    function: str
    """What the learner completes."""
    check: Callable[[Any], Verdict]
    """Judges it, as the notebook calls it."""
    wrong: Mapping[str, str]
    """Bodies of wrong answers, at least three, by what their verdict says first; all different."""


BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"


def changed(lab: str, name: str, *lines: tuple[str, str]) -> str:
    """The body of the notebook's own function or class with some lines replaced: as each is, and what it becomes.

    Args:
        lab: the number that its source begins with, such as "02".
        name: of the function or class.
        lines: pairs of texts; each first one stands once in the body.
    """
    (source,) = SOURCES.glob(f"{lab}_*.py")
    (text,) = re.split(rf"^(?:def|class) {name}\(", source.read_text(), flags=re.MULTILINE)[1:]
    body = solution(re.split(r"^(?:# %%|def |class )", text, flags=re.MULTILINE)[0])
    for old, new in lines:
        assert body.count(old) == 1, f"{old!r} stands {body.count(old)} times in the answer to {name}"
        body = body.replace(old, new)
    return body


def solution(text: str) -> str:
    """What stands from the first mark of a solution to the last, of a class with the heads of methods between."""
    inside = text.partition(f"{BEGIN}\n")[2].rpartition(f"{END}")[0].rstrip(" ")
    lines = [line for line in inside.splitlines() if line.strip() not in (BEGIN, END)]
    return textwrap.dedent("\n".join(lines) + "\n")
