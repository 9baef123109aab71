"""Pages for teachers: plans with the minutes of the labs, and a wrong answer beside each misconception."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from notebooks.tools import minutes
from notebooks.tools.source import find_labs, read_source

START_MINUTES, QUESTION_MINUTES = 5, 2
SLIDES = "<!-- the slides -->"
PLAN = re.compile(r"^## (.+) \((\d+) minutes(?:, (\d+) of them breaks)?\)$", re.MULTILINE)
SECTION = re.compile(r"^## (\d+)\. (.+?) \(")
EXERCISE = re.compile(r"^### Exercise (\d+): ")
TABLE = re.compile(r"^\| lab \|.*(?:\n\|.*)*", re.MULTILINE)
ROW = re.compile(r"^\|(?! ?---) ?(.+?) ?\|$", re.MULTILINE)


@dataclass
class Section:
    """A lab's section: its heading, its minutes without exercises, and those of each exercise."""

    title: str
    minutes: float
    exercises: dict[str, int]


def sections_of_labs(root: Path) -> dict[tuple[str, str], Section]:
    """The sections of all labs by lab and number; number "" is what comes before the first."""
    found = {}
    for lab in find_labs(root / "notebooks"):
        name = lab.name.partition("_")[0].removeprefix("0")
        section = found[name, ""] = Section("The beginning", 0.0, {})
        for part in minutes.split_into_parts(read_source(lab.source)):
            if match := SECTION.match(part.heading):
                section = found[name, match[1]] = Section(match[2], 0.0, {})
            if match := EXERCISE.match(part.heading):
                section.exercises[match[1]] = part.exercise_minutes
            section.minutes += part.minutes - part.exercise_minutes
    return found


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, heads included."""
    return [re.split(r"(?<!\\) \| " if " | " in row else r"(?<!\\)\|", row) for row in ROW.findall(text)]


@dataclass
class Plan:
    """A class: how long it lasts, how many of these minutes are breaks, and what it does."""

    title: str
    minutes: int
    breaks: int
    steps: list[tuple[str, str, list[str]]]
    """Of each step the lab, the section, and the exercises that are written there."""
    table: str
    """The plan as docs/plans.md has it."""

    def minutes_until(self, sections: dict[tuple[str, str], Section]) -> list[float]:
        """The minutes from the start to the end of each step, questions included, breaks not."""
        until, now = [], float(START_MINUTES)
        for lab, number, exercises in self.steps:
            section = sections[lab, number]
            now += section.minutes + sum(section.exercises[each] for each in exercises)
            now += QUESTION_MINUTES * bool(number)
            until.append(now)
        return until


def read_plans(text: str, sections: dict[tuple[str, str], Section]) -> list[Plan]:
    """The plans of docs/plans.md."""
    _, *pieces = PLAN.split(text)
    plans = []
    for title, length, breaks, body in zip(*(pieces[place::4] for place in range(4)), strict=True):
        steps, table = [], TABLE.search(body)[0]
        for lab, numbers, chosen in table_rows(table)[1:]:
            left = chosen.replace("–", "").split()
            for number in ["", *numbers.split()]:
                written = [each for each in left if each in sections[lab, number].exercises]
                left = [each for each in left if each not in written]
                steps.append((lab, number, written))
            if left:
                raise ValueError(f"{title}: exercises {left} of lab {lab} are in no section of it")
        plans.append(Plan(title, int(length), int(breaks or 0), steps, table))
    return plans


def plans_page(text: str, root: Path, *, has_pdf: bool) -> str:
    """The page of plans: a row for each section, with its minutes, and links to the slides of these labs."""
    sections = sections_of_labs(root)
    plans = read_plans(text, sections)
    taught = {lab for plan in plans for lab, *_ in plan.steps}
    paths = sorted(path for lab in taught for path in (root / "notebooks" / "solved").glob(f"0{lab}_*.ipynb"))
    links = ", ".join(slides_links(path.stem, has_pdf=has_pdf) for path in paths)
    text = text.replace(SLIDES, f"```{{raw}} html\n<p>Slides: {links}.</p>\n```")
    for plan in plans:
        lines, before = ["| lab | section | exercises | minutes |", "|---|---|---|---|"], START_MINUTES
        lines.append(f"| – | The start | – | {START_MINUTES} |")
        until = plan.minutes_until(sections)
        for (lab, number, exercises), end in zip(plan.steps, until, strict=True):
            title = f"{number}. {sections[lab, number].title}".removeprefix(". ")
            # Rounded from the start on, so that the rows sum to the last line.
            lines.append(f"| {lab} | {title} | {', '.join(exercises) or '–'} | {round(end) - before} |")
            before = round(end)
        taken = math.ceil(until[-1]) + plan.breaks
        breaks = f"{plan.breaks} are for breaks, and " * bool(plan.breaks)
        rest = f"{breaks}{plan.minutes - taken} are left for what comes up"
        lines += ["", f"Together {math.ceil(until[-1])} of {plan.minutes} minutes; {rest}."]
        text = text.replace(plan.table, "\n".join(lines), 1)
    return text


def slides_links(stem: str, *, has_pdf: bool) -> str:
    """Links to a lab's slides as a page and, if they were printed, as PDF."""
    pdf = f' (<a href="slides/{stem}.pdf" aria-label="lab {stem[1]} as PDF">PDF</a>)' if has_pdf else ""
    return f'<a href="slides/{stem}.html">lab {stem[1]}</a>{pdf}'


def room_page(text: str, exercises: str) -> str:
    """The page of questions and misconceptions; ``exercises`` is the page of wrong answers."""
    head, mark, table = text.partition("| exercise | what they believe | the verdict begins |\n")
    lines = ["| exercise | what they believe | a wrong answer | the verdict begins |", "|---|---|---|---|"]
    for number, belief, verdict in table_rows(table):
        answer = wrong_answers(exercises)[number, verdict]
        lines.append(f"| {number} | {belief} | {answer} | {verdict} |")
    return head + "\n".join(lines) + "\n" if mark else text


def wrong_answers(page: str) -> dict[tuple[str, str], str]:
    """Each wrong answer by the number of its exercise and how its verdict begins."""
    found = {}
    for piece in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        for answer, said in table_rows(piece)[1:]:
            found[piece.split()[0], said] = answer
    return found
