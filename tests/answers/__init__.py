"""Wrong answers to the labs' exercises, and what their checks say. One file a lab, each with its ``EXERCISES``.

tests/test_exercises.py hands every one of them to its check and writes the table docs/exercises.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.checks.ask import Verdict


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
