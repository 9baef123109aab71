"""Run a learner's functions on real ranks and judge the output of each rank.

The functions are pickled by value, with everything they use from other notebook cells. A rank that
saves no output is unfinished, whatever its exit status.
"""

import json
import linecache
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import labkit
from labkit.errors import LabError
from labkit.launcher import payload_pickling
from labkit.runs import private_files
from labkit.runs.folder import RunFolder, disk_problem, explain_write_errors, read_json
from labkit_course.checks import judge as judging
from labkit_course.checks.judge import NotJudged, WrongAnswer
from labkit_course.checks.ranks import answer_program
from labkit_course.checks.ranks.answer_program import EARLY_EXIT_TEXT, output_path

TEMPORARY_FIX = "make room, or set TMPDIR to a folder on another disk, and restart the kernel"
RANK_ENDED_TEXT = "(this rank had ended"
FRAME_PATTERN = re.compile(r'File "(.+)", line (\d+) in (\S+)')
THREAD_PATTERN = re.compile("^(?:Current thread|Thread) .*$", re.MULTILINE)


def judge_on_ranks(
    lab: str,
    *answers: Callable[..., Any],
    judge: Callable[[int, int, dict[str, Any]], None] = lambda ranks, index, output: None,
    judge_all: Callable[[int, list[dict[str, Any]]], None] = lambda ranks, outputs: None,
    sizes: Sequence[int],
    timeout_s: float,
    waiting: str,
    hints: Mapping[str, str] | None = None,
    name_rank: bool = False,
    **setup: Any,
) -> list[dict[str, Any]]:
    """Run answers on CPU ranks, judge each rank's output in this process, and return the outputs.

    An answer has to be right on each of these ``sizes``, numbers of ranks, one launch after the
    other; the outputs are those of the first. The module ``lab`` in checks/ranks calls
    ``run_answer(*answers, **setup)``. ``judge`` gets the number of ranks, the rank, and what that
    rank returned; ``name_rank`` puts "on rank …" in front of its WrongAnswer. ``judge_all`` then
    gets the number of ranks, and what all of them returned. If ranks wait for each other the
    verdict asks ``waiting``; ``hints`` holds advice by a part of a rank's error.
    """
    for answer in answers:
        judging.raise_if_not_attempted(answer)
    run = partial(
        _run_and_judge,
        *(lab, answers, judge, judge_all),
        timeout_s=timeout_s,
        waiting=waiting,
        hints=hints or {},
        name_rank=name_rank,
        setup=setup,
    )
    first, *others = sizes
    outputs = run(first)
    for ranks in others:
        try:
            run(ranks)
        except WrongAnswer as wrong:
            said = f"right on {first} ranks, but with {ranks} ranks: {wrong}"
            hint = wrong.hint or f"Does something count on {first} ranks?"
            raise WrongAnswer(said, expected=wrong.expected, hint=hint) from None
    return outputs


def _run_and_judge(
    lab: str,
    answers: Sequence[Callable[..., Any]],
    judge: Callable[[int, int, dict[str, Any]], None],
    judge_all: Callable[[int, list[dict[str, Any]]], None],
    ranks: int,
    *,
    timeout_s: float,
    waiting: str,
    hints: Mapping[str, str],
    name_rank: bool,
    setup: Mapping[str, Any],
) -> list[dict[str, Any]]:
    with private_files.temporary_folder() as folder:
        content = pack_answers(answers)
        with explain_write_errors(folder, TEMPORARY_FIX):
            (folder / answer_program.ANSWERS_FILE).write_bytes(content)
        parameters: dict[str, Any] = {"folder": str(folder), "digest": sha256(content).hexdigest()}
        parameters |= {"lab": lab, "setup": json.dumps(setup)}
        program, problem = Path(answer_program.__file__), ""
        try:
            labkit.run(program, nproc=ranks, device="cpu", timeout_s=timeout_s, **parameters)
        except labkit.RankFailed as failure:
            if full := disk_problem(folder, TEMPORARY_FIX):
                raise LabError(full) from failure
            problem = _failure_reason(failure, folder, ranks, waiting, hints)
        except labkit.RunTimedOut as stopped:
            problem = _timeout_reason(stopped, answers, waiting)
        # An answer that calls os._exit(0) ends its rank without a failure.
        done = _ranks_with_output(folder, ranks)
        if not problem and len(done) < ranks:
            problem = f"rank {min(set(range(ranks)) - set(done))} {EARLY_EXIT_TEXT}"
        outputs = [torch.load(output_path(folder, index), weights_only=True) for index in done]
    # A wrong value on one rank often explains the failure of another, so it is reported first.
    if EARLY_EXIT_TEXT not in problem:
        for index, output in zip(done, outputs, strict=True):
            try:
                judge(ranks, index, output)
            except WrongAnswer as wrong:
                said = f"on rank {index}, {wrong}" if name_rank else str(wrong)
                raise WrongAnswer(said, expected=wrong.expected, hint=wrong.hint) from None
    judging.expect(not problem, problem)
    judge_all(ranks, outputs)
    return outputs


def _ranks_with_output(folder: Path, ranks: int) -> list[int]:
    return [index for index in range(ranks) if output_path(folder, index).exists()]


def pack_answers(answers: Sequence[Callable[..., Any]]) -> bytes:
    """Pickle functions for ``payload.unpack_payload``, or raise WrongAnswer if that fails."""
    numbered = {f"answer {number}": answer for number, answer in enumerate(answers)}
    try:
        return payload_pickling.pack_payload(numbered)
    except payload_pickling.PayloadError as error:
        names = " and ".join(map(judging.answer_name, answers))
        reason = judging.error_text(error.__cause__ or error)
        said = f"{names} cannot be sent to the ranks with what is used there: {reason}"
        # IPython's exit() refers to the whole shell, which cannot be pickled.
        codes = [answer.__code__ for answer in answers if hasattr(answer, "__code__")]
        leaves = any({"exit", "quit"} & {*code.co_names} for code in codes)
        raise WrongAnswer(f"{said}. Does it call exit()?" if leaves else said) from error


def _failure_reason(
    failure: labkit.RankFailed, folder: Path, ranks: int, waiting: str, hints: Mapping[str, str]
) -> str:
    """Say why a rank failed: its own error, or a peer that had already left."""
    if failure.exc_type == WrongAnswer.__name__:
        return failure.message
    run = RunFolder(failure.log.parent)
    if read_json(run.error(failure.rank)).get("echo"):
        done = _ranks_with_output(folder, ranks)
        # torchrun lists the ranks that it killed. Without that list, a missing output does not
        # show that the rank left by itself.
        failures = read_json(run.exit_json()).get("failures") or ()
        missing = set(range(ranks)) - {*done, *(end["rank"] for end in failures)}
        gone = [str(index) for index in sorted(missing) if not run.error(index).exists()]
        if gone and failures:
            return f"rank {' or '.join(gone)} {EARLY_EXIT_TEXT}"
        if done:
            return f"rank {failure.rank} waited for rank {done[0]}, which was done: {waiting}"
    error = f"{failure.exc_type}: {failure.message}" if failure.message else failure.exc_type
    hint = next((hint for part, hint in hints.items() if part in error), "")
    return f"{hint} ({error})" if hint else f"on rank {failure.rank}, {error}"


def _timeout_reason(
    stopped: labkit.RunTimedOut, answers: Sequence[Callable[..., Any]], waiting: str
) -> str:
    """Say if a rank was still in an answer or all waited; raise NotJudged for anything else."""
    codes = [answer.__code__ for answer in answers if hasattr(answer, "__code__")]
    first_lines = {(code.co_filename, code.co_name): code.co_firstlineno for code in codes}
    after, busy, where_waiting = f"after {stopped.timeout_s:g} s rank", -1, ""
    for index, stack in sorted(stopped.stacks.items()):
        for file, line, name in FRAME_PATTERN.findall(stack):
            if (file, name) in first_lines and not where_waiting:
                place, text = _line_in_function(file, int(line), first_lines[file, name])
                where_waiting = f", rank {index} in line {place} of {name}, `{text}`"
        file, line, name, text = _innermost_frame(stack, first_lines)
        if (file, name) in first_lines:
            place, text = _line_in_function(file, line, first_lines[file, name])
            where = f"line {place} of {name}, `{text}`"
            return f"{after} {index} was still in {where}: when does its loop end?"
        if not file and not stack.startswith(RANK_ENDED_TEXT):
            busy = index
    if busy >= 0:
        where = "was outside your function and waited for no other rank"
        raise NotJudged(f"{after} {busy} {where}: this machine is busy; run the check again")
    return f"the ranks waited for each other for {stopped.timeout_s:g} s{where_waiting}: {waiting}"


def _line_in_function(file: str, line: int, first_line: int) -> tuple[int, str]:
    return line - first_line + 1, linecache.getline(file, line).strip()


def _innermost_frame(stack: str, own: Container[tuple[str, str]]) -> tuple[str, int, str, str]:
    """Return file, line, function and text of the innermost frame that waits or is in an answer."""
    for thread in THREAD_PATTERN.split(stack):
        for file, line, name in FRAME_PATTERN.findall(thread):
            text = linecache.getline(file, int(line)).strip()
            # Work.wait() is C++, so only the line that calls it shows up in the stack.
            if "torch/distributed" in file or re.search(r"\bwait\(", text):
                return file, int(line), "", text
            if (file, name) in own or name == answer_program.save_answer_output.__name__:
                return file, int(line), name, text
    return "", 0, "", ""
