"""Checks of lab 8, beyond one machine."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit_cluster.local_hosts import start_local_hosts
from labkit_cluster.typed import Terminals
from labkit_course import job_script, launches
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, WrongAnswer, exercise, expect
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks.hosts import CASES
from labkit_course.launches import LostHost

LAB = "hosts"
RANK_LINE = re.compile(r"^rank (\d+) of 4: .*, sum of ones 4$", re.MULTILINE)
SIZES = 2, 3
RANKS_OF_A_HOST = 2
LAUNCH_LIMIT_S = 90


@exercise
def launch_line(answer: Callable[..., Any], terminals: Terminals | None = None) -> Verdict:
    """Exercise 1: a line that starts a program on two hosts, from ranks of a host and program."""
    name = judge.answer_name(answer)
    line = judge.call_answer(answer, 2, "who.py")
    said = f"{name}(2, 'who.py') gave {judge.value_text(line)}"
    expect(isinstance(line, str) and "torchrun" in line, said, "a line with torchrun, as text")
    how, works, words = "as each host's shell reads it", None, ""
    if terminals is not None and terminals.are_machines:
        (terminals.folder / "who.py").write_text(launches.WHO)
        on_hosts, how = terminals.run(line, limit_s=LAUNCH_LIMIT_S), "both hosts ran it"
        ranks = [int(rank) for text in on_hosts.values() for rank in RANK_LINE.findall(text)]
        works = sorted(ranks) == [0, 1, 2, 3]
        told_lines = [each for text in on_hosts.values() for each in launches.telling_lines(text)]
        words = f"; the last words: {told_lines[-1]}" if told_lines else ""
    try:
        told = launches.read_line(line)
        problem, hint = launches.problem_of(told)
    except LabError as error:
        told, problem, hint = {}, str(error), ""
    if works is False and not problem and not words:
        busy = f"after {LAUNCH_LIMIT_S} s the hosts were still silent: this machine is busy"
        raise judge.NotJudged(f"{busy}; run the check again")
    # What the hosts did counts more than how the line is read.
    is_right = not problem if works is None else works
    seen = f"{problem or 'the ranks are not in one world'}{words}"
    expect(is_right, seen, "4 ranks in one world", hint)
    if host := launches.begins_alone(told):
        said_late = f"both join, but {host} trains alone if the other is late"
        raise WrongAnswer(said_late, expected="that it waits", hint="Two hosts or none.")
    _expect_parameters(answer, name)
    return judge.passing_verdict(f"4 ranks in one world ({how})")


def _expect_parameters(answer: Callable[..., Any], name: str) -> None:
    """Raise WrongAnswer unless a line has the ranks and the program that were asked for."""
    line = judge.call_answer(answer, 3, "train.py")
    try:
        told = {(each.ranks, each.program) for each in launches.read_line(str(line)).values()}
    except LabError as error:
        raise WrongAnswer(f"of {name}(3, 'train.py'), {error}") from None
    starts = " and ".join(f"{ranks} ranks of {program}" for ranks, program in sorted(told))
    seen = f"{name}(3, 'train.py') starts {starts} on a host"
    expect(told == {("3", "train.py")}, seen, "3 ranks of train.py", "Use both arguments.")


@exercise
def shard_hybrid(answer: Callable[..., Any], timeout_s: float = 60) -> Verdict:
    """Exercise 2: FSDP inside each host and copies across hosts, from (model, hosts, ranks)."""

    def judge_all(world: int, outputs: list[dict[str, Any]]) -> None:
        hosts = f"{world // RANKS_OF_A_HOST} hosts of {RANKS_OF_A_HOST} ranks"
        first = outputs[0]
        held, whole = (sum(output["held"] for output in outputs), first["parameters"])
        expect(
            held > whole,
            f"all {world} ranks together hold one copy of the model",
            f"a copy on each of {hosts}",
            "A mesh of two axes: fully_shard replicates along the first and shards along the last.",
        )
        share = f"1/{RANKS_OF_A_HOST} of the model"
        expect(
            first["held"] * RANKS_OF_A_HOST == whole,
            f"rank 0 holds {first['held'] / whole:.2g} of the model's parameters",
            f"{share}, with {hosts}",
            "How many ranks share one copy? They are along the mesh's last axis.",
        )
        for kind in ("all_gather", "reduce_scatter"):
            apart = next((each["crossing"][kind] for each in outputs if each["crossing"][kind]), 0)
            expect(
                not apart,
                f"with {hosts}, {apart} calls of {kind} join ranks of different hosts",
                "none",
                "Ranks are numbered host by host, so the last axis has to be as long as a host.",
            )
        units = first["gathers"]
        expect(
            units >= first["blocks"],
            f"the model is gathered in {units} call{'s' * (units != 1)} in the forward pass",
            f"{first['blocks']}, one for each block",
            "Call fully_shard for each block, and then for the model.",
        )
        wrong = next((rank for rank, each in enumerate(outputs) if each["wrong"]), None)
        expect(
            wrong is None,
            f"on rank {wrong}, {', '.join(outputs[wrong or 0]['wrong'])} has another gradient",
            "the mean over all ranks",
            "Do ranks with the same shard average it across hosts? fully_shard does, given a mesh"
            " of two axes.",
        )

    judge_on_ranks(
        "hosts",
        answer,
        judge_all=judge_all,
        sizes=(3 * RANKS_OF_A_HOST,),
        timeout_s=timeout_s,
        waiting="do all ranks make the same mesh?",
        what="shard",
        ranks=RANKS_OF_A_HOST,
    )
    return judge.passing_verdict("3 hosts of 2 ranks: only all-reduces leave a host")


@exercise
def train(answer: Callable[..., Any], happened: LostHost | None = None) -> Verdict:
    """Exercise 3: a training that saves every few steps and at a stop, and goes on after a loss."""
    judge.raise_if_not_attempted(answer)
    if happened is None:
        with tempfile.TemporaryDirectory() as place, start_local_hosts(2) as hosts:
            line = launches.working_line(hosts)
            happened = launches.lose_host(Terminals(hosts, Path(place)), line, answer)
    assert happened is not None, "an empty answer is not attempted"
    before, after = launches.losses(happened.lost), launches.losses(happened.resumed)
    every, last = launches.EVERY, launches.STEPS - 1
    expect(
        launches.LOST_AT in before,
        f"before a host was lost it trained {len(before)} steps{_error_in(happened.lost)}",
        f"steps 0 to {launches.LOST_AT}",
    )
    saved = [int(name.split("_")[-1]) for name in happened.saves]
    right = [*range(every, launches.LOST_AT + 1, every)]
    expect(
        saved == right,
        f"after {launches.LOST_AT + 1} steps there are saves of {_steps_text(saved)} steps",
        f"saves of {_steps_text(right)} steps, with every = {every}",
        "After step 3 four steps are done. The names are step_ and the number of steps done.",
    )
    begun = after.first_valid_index()
    expect(begun is not None, f"it did not go on{_error_in(happened.resumed)}", "step 8")
    expect(
        begun == right[-1],
        f"it went on with step {begun}",
        f"step {right[-1]}, which the newest save has not",
        "A save with the number 8 holds what steps 0 to 7 have done.",
    )
    for step, what in ((begun, "Are the weights"), (begun + 1, "Is the optimizer's state")):
        expect(
            judge.is_close(after[step], before[step], rtol=1e-4),
            f"step {step} has the loss {after[step]:.4f}, and {before[step]:.4f} before",
            "the same",
            f"{what} loaded? dcp.load fills the state, and set_state_dict puts it in place.",
        )
    ended = after.last_valid_index()
    expect(ended == last, f"it ended after step {ended}{_error_in(happened.resumed)}", f"{last}")
    asked = f"one_step({last + 1}) returned True"
    trained = [*launches.losses(happened.stopped).index]
    expect(
        trained == [last + 1],
        f"{asked}, and it trained {len(trained)} steps{_error_in(happened.stopped)}",
        "1 step",
        "What does one_step return? If it is True, save and return.",
    )
    newest = int(happened.last_save.split("_")[-1])
    expect(
        newest == last + 2,
        f"{asked}, and the newest save has {newest} steps",
        f"{last + 2}",
        "At a stop it saves, whatever the number of steps.",
    )
    return judge.passing_verdict(
        f"a host was lost in step {launches.LOST_AT}, and step {begun} came next; a stop was saved"
    )


def _steps_text(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "no"


def _error_in(text: str) -> str:
    """Return the last error in what was printed, with a colon before it."""
    errors = [line for line in launches.telling_lines(text) if "Error" in line]
    return f": {errors[-1]}" if errors else ""


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
    """Exercise 4: whether any rank was asked to stop, the same on every rank."""

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
    """Exercise 5: a job's script that saves when it is preempted, and queues again."""
    script = _mended(answer, job_script.broken_script(), "script")
    problem, hint = job_script.problem_of(job_script.rehearse(script))
    expect(not problem, problem, hint=hint)
    return judge.passing_verdict("both nodes train in one run, save at the signal, and queue again")
