"""Checks of lab 8, beyond one machine."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit_cluster.typed import Terminals
from labkit_course import job_script, launches
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, WrongAnswer, exercise, expect
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks.hosts import CASES

LAB = "hosts"
RANK_LINE = re.compile(r"^rank (\d+) of 4: .*, sum of ones 4$", re.MULTILINE)
SIZES = 2, 3


@exercise
def newest_complete(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: the newest checkpoint in a folder that was written to its end, or None."""
    with tempfile.TemporaryDirectory() as place:
        folder, name = Path(place), judge.answer_name(answer)
        found = judge.call_answer(answer, folder, in_words=f"{name} of an empty folder")
        said = f"of an empty folder it gave {judge.value_text(found)}"
        judge.expect(found is None, said, "None: begin at step 0")
        for step in (9, 10, 11):
            checkpoint = folder / f"step_{step}"
            checkpoint.mkdir()
            (checkpoint / "__0_0.distcp").write_bytes(b"a shard")
            # A save that is cut off has shards, but no table of them.
            if step < 11:
                (checkpoint / ".metadata").write_bytes(b"the table")
        asked = f"{name} of step_9, step_10, and step_11 without .metadata"
        found = judge.call_answer(answer, folder, in_words=asked)
    name = Path(found).name if isinstance(found, str | Path) else ""
    cut_off = "A save writes .metadata last. Without it the save was cut off."
    judge.expect(name != "step_11", "it gave step_11, which was cut off", "step_10", cut_off)
    as_text = "As text, 'step_9' comes after 'step_10'. Compare int(path.name.split('_')[1])."
    judge.expect(name != "step_9", "it gave step_9, and step_10 is newer", "step_10", as_text)
    is_right = bool(name) and Path(found) == folder / "step_10"
    judge.expect(is_right, f"it gave {judge.value_text(found)}", "the path of step_10 in folder")
    return judge.passing_verdict("the newest of two complete ones, beside one that was cut off")


@exercise
def mend_first(answer: Callable[..., Any], terminals: Terminals | None = None) -> Verdict:
    """Exercise 2: a launch whose endpoint is a loopback address, mended."""
    return _judge_launch(answer, "first", terminals)


@exercise
def mend_second(answer: Callable[..., Any], terminals: Terminals | None = None) -> Verdict:
    """Exercise 3: a launch whose ranks use the wrong network interface, mended."""
    return _judge_launch(answer, "second", terminals)


@exercise
def mend_third(answer: Callable[..., Any], terminals: Terminals | None = None) -> Verdict:
    """Exercise 4: a launch that falls back to localhost, with 1 to 2 hosts, mended."""
    return _judge_launch(answer, "third", terminals)


def _judge_launch(answer: Callable[..., Any], name: str, terminals: Terminals | None) -> Verdict:
    """Type the mended line on both hosts if they are machines; otherwise read it."""
    line, how = _mended(answer, launches.LINES[name], "line"), "as each host's shell reads it"
    works, words = None, ""
    if terminals is not None and terminals.are_machines:
        (terminals.folder / "who.py").write_text(launches.WHO)
        said, how = terminals.run(line), "both hosts ran it"
        ranks = [int(rank) for text in said.values() for rank in RANK_LINE.findall(text)]
        works = sorted(ranks) == [0, 1, 2, 3]
        told_lines = [each for text in said.values() for each in launches.telling_lines(text)]
        words = f"; the last words: {told_lines[-1]}" if told_lines else ""
    try:
        told = launches.read_line(line)
        problem, hint = launches.problem_of(told)
    except LabError as error:
        told, problem, hint = {}, str(error), ""
    # What the hosts did counts more than how the line is read.
    is_right = not problem if works is None else works
    seen = f"{problem or 'the ranks are not in one world'}{words}"
    expect(is_right, seen, "4 ranks in one world", hint)
    if host := launches.begins_alone(told):
        said_late = f"both join, but {host} trains alone if the other is late"
        raise WrongAnswer(said_late, expected="that it waits", hint="Two hosts or none.")
    return judge.passing_verdict(f"4 ranks in one world ({how})")


def _mended(answer: Callable[..., Any], broken: str, what: str) -> str:
    """Return the text that an answer makes of a broken one."""
    found = judge.call_answer(answer, broken, in_words=f"{judge.answer_name(answer)}({what})")
    said = f"{judge.answer_name(answer)}({what}) gave {judge.value_text(found)}"
    expect(isinstance(found, str), said, f"the mended {what}, as text")
    unchanged = f"the {what} is as it was: replace returns a new text, and the old if none matches"
    expect(found.strip() != broken.strip(), unchanged)
    return str(found)


@exercise
def all_stop(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 5: whether any rank was asked to stop, the same on every rank."""

    def judge_all(ranks: int, outputs: list[dict[str, Any]]) -> None:
        for case, name in enumerate(CASES):
            found = [output["stops"][case] for output in outputs]
            wrong = next((each for each in found if isinstance(each, str)), "")
            expect(not wrong, f"all_stop returned {wrong}", "True or False")
            stops = [rank for rank, each in enumerate(found) if each]
            right = [] if name == "nobody" else list(range(ranks))
            who = "everybody" if len(stops) == ranks else _ranks_text(stops)
            split = "The others wait for it in the next step. Let the ranks agree by a collective."
            hint = split if 0 < len(stops) < ranks else "One rank that is asked is enough."
            seen = f"if {name} is asked, {who} stops"
            expect(stops == right, seen, "everybody" if right else "nobody", hint)

    judge_on_ranks(
        "hosts",
        answer,
        judge_all=judge_all,
        sizes=SIZES,
        timeout_s=timeout_s,
        waiting="do all ranks make the same collectives, asked or not?",
    )
    return judge.passing_verdict("2 and 3 ranks agree, whoever is asked")


def _ranks_text(ranks: list[int]) -> str:
    return f"only rank {' and '.join(map(str, ranks))}" if ranks else "nobody"


@exercise
def mend_script(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: a job's script that saves when it is preempted, and queues again."""
    script = _mended(answer, job_script.broken_script(), "script")
    problem, hint = job_script.problem_of(job_script.rehearse(script))
    expect(not problem, problem, hint=hint)
    return judge.passing_verdict("both nodes train in one run, save at the signal, and queue again")
