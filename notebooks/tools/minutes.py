"""Estimate how many minutes a learner needs for a notebook.

    python -m notebooks.tools.minutes      # words, cells, exercises and minutes of every notebook

Nobody writes minutes by hand. A source has ``{minutes}`` in a heading, or in the line in bold below it, and
``{core_minutes}`` where the notebook begins; the build puts the numbers in their place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

Notebook = Any  # nbformat's NotebookNode, whose attributes depend on its contents
WORDS_A_MINUTE, LINES_A_MINUTE = 130, 20
EXERCISE_MINUTES = {"•": 5, "••": 12, "•••": 25}
COMMIT_MINUTES, RUN_MINUTES = 1.5, 1.0
MINUTES, CORE_MINUTES, OPTIONAL_MINUTES = "{minutes}", "{core_minutes}", "{optional_minutes}"
HINT = re.compile(r"<details>.*?</details>", re.DOTALL)
SOLUTION = re.compile(r"### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)
RUN = re.compile(r"%%torchrun|\blabkit\.(?:run|check|compare|simulate|plan|submit)\(|\bplots\.|\bwidgets\.|\bvisit\(")
EXERCISE = re.compile(r"^### Exercise .*\((?:optional, )?(•+)")
OPTIONAL = re.compile(r"^#+ .*\(optional\b|^\*\*optional\b", re.MULTILINE)


@dataclass
class Part:
    """What stands below one heading, up to the next."""

    section: int
    heading: str
    optional: bool = False
    words: int = 0
    minutes: float = 0.0

    @property
    def exercise_minutes(self) -> int:
        """What the exercise takes that the heading announces; 0 for other headings."""
        found = EXERCISE.match(self.heading)
        return EXERCISE_MINUTES[found[1]] if found else 0


def split_into_parts(source: Notebook) -> list[Part]:
    """Return the parts of a source, markers included, with their minutes."""
    parts = [Part(0, "")]
    for cell in source.cells:
        if cell.cell_type == "code":
            parts[-1].minutes += _code_minutes(cell)
            continue
        for piece in re.split(r"^(?=##+ )", cell.source, flags=re.MULTILINE):
            heading = piece.partition("\n")[0]
            if heading.startswith("##"):
                parts.append(Part(parts[-1].section + heading.startswith("## "), heading))
                parts[-1].minutes = parts[-1].exercise_minutes
            part, words = parts[-1], len(HINT.sub("", piece).split())
            part.optional |= bool(OPTIONAL.search(piece))
            part.words += words
            part.minutes += words / WORDS_A_MINUTE
    whole = {part.section for part in parts if part.optional and part.heading.startswith("## ")}
    for part in parts:
        part.optional |= part.section in whole
    return parts


def _code_minutes(cell: Notebook) -> float:
    tags, given = cell.metadata.get("tags", []), SOLUTION.sub("", cell.source)
    if "claim" in tags:
        return 0.0
    lines = sum(bool(line.strip()) for line in given.splitlines())
    commit = COMMIT_MINUTES * ("commit" in tags)
    return lines / LINES_A_MINUTE + commit + RUN_MINUTES * bool(RUN.search(given))


def core_and_optional(parts: list[Part]) -> tuple[int, int]:
    """Return the whole minutes of the core and of what is optional."""
    core = sum(part.minutes for part in parts if not part.optional)
    return round(core), round(sum(part.minutes for part in parts) - core)


def write_minutes(source: Notebook) -> None:
    """Put minutes in the place of their marks, in all cells of text."""
    parts = split_into_parts(source)
    core, optional = core_and_optional(parts)
    remaining = iter(parts)
    part, told = next(remaining), 0
    for cell in source.cells:
        if cell.cell_type != "markdown":
            continue
        lines = cell.source.split("\n")
        for place, line in enumerate(lines):
            if line.startswith("##"):
                part = next(remaining)
            if MINUTES in line:
                minutes = part.exercise_minutes or round(_minutes_below(part, parts))
                if part.heading.startswith("## ") and not part.optional:
                    # From the last section that told its minutes, so that all sum to the head's.
                    minutes, told = _core_until(part, parts) - told, _core_until(part, parts)
                line = line.replace(MINUTES, str(max(1, minutes)))
            line = line.replace(CORE_MINUTES, str(core))
            line = line.replace(OPTIONAL_MINUTES, str(optional))
            lines[place] = re.sub(r"\b1 minutes", "1 minute", line)
        cell.source = "\n".join(lines)


def _core_until(part: Part, parts: list[Part]) -> int:
    """Return the whole minutes of the core from the notebook's first line to the end of a part's section."""
    return round(sum(each.minutes for each in parts if each.section <= part.section and not each.optional))


def _minutes_below(part: Part, parts: list[Part]) -> float:
    """Return the minutes of a part; those of a section's heading are the section's."""
    whole = part.heading.startswith("## ")
    return sum(each.minutes for each in parts if each is part or (whole and each.section == part.section))


def main() -> None:
    """Print a table of all notebooks."""
    from notebooks.tools.source import find_labs, read_source

    rows = {}
    for lab in find_labs(Path(__file__).resolve().parents[1]):
        source = read_source(lab.source)
        parts = split_into_parts(source)
        core, optional = core_and_optional(parts)
        rows[lab.name] = {
            "words": sum(part.words for part in parts),
            "cells": len(source.cells),
            "exercises": sum(bool(part.exercise_minutes) for part in parts),
            "core, min": core,
            "optional, min": optional,
        }
    print(pandas.DataFrame.from_dict(rows, orient="index").to_string())


if __name__ == "__main__":
    main()
