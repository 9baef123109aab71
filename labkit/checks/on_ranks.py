"""Runs a learner's functions on real ranks, and brings home what came of them.

The functions travel by value, with whatever they use of other cells. A rank that sends nothing home
has not finished, however it ended: nothing passes that every rank has not sent.
"""

import json
import linecache
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import labkit
from labkit.checks.judge import (
    NotJudged,
    WrongAnswer,
    answer_name,
    error_text,
    raise_if_not_attempted,
)
from labkit.checks.ranks.answer_program import (
    ANSWERS_FILE,
    EARLY_EXIT_TEXT,
    output_path,
    save_answer_output,
)
from labkit.launcher import payload_pickling
from labkit.runs.folder import RunFolder, read_json

RANK_ENDED_TEXT = "(this rank had ended"
ANSWER_PROGRAM = Path(__file__).with_name("ranks") / "answer_program.py"
FRAME_PATTERN = re.compile(r'File "(.+)", line (\d+) in (\S+)')
THREAD_PATTERN = re.compile("^(?:Current thread|Thread) .*$", re.MULTILINE)


def judge_on_ranks(
    lab: str,
    *answers: Callable[..., Any],
    judge: Callable[[int, dict[str, Any]], None],
    ranks: int,
    timeout_s: float,
    waiting: str,
    hints: Mapping[str, str] | None = None,
    **setup: Any,
) -> None:
    """Run answers on ranks, and judge here what each rank sends home.

    Args:
        lab: the module in checks/ranks whose ``run_answer`` calls the answers.
        *answers: the learner's functions.
        judge: called with each rank and what it sent; raises Wrong. What has come home is judged
            even if a rank failed.
        ranks: how many, on the CPU.
        timeout_s: they are stopped after this.
        waiting: a question that helps when ranks wait for each other.
        hints: for an error on a rank, what to do about it, by a part of its text.
        **setup: arguments of ``run_answer`` beside the answers, such as JSON can hold.

    Raises:
        NotAttempted: an answer is empty.
        NotJudged: the machine was too busy to tell.
        Wrong: an answer cannot be sent, or a rank failed, ended early, did not end, or sent
            something wrong.
    """
    for answer in answers:
        raise_if_not_attempted(answer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = pack_answers(answers)
        (folder / ANSWERS_FILE).write_bytes(content)
        parameters: dict[str, Any] = {"folder": name, "digest": sha256(content).hexdigest()}
        parameters |= {"lab": lab, "setup": json.dumps(setup)}
        problem = ""
        try:
            labkit.run(ANSWER_PROGRAM, nproc=ranks, device="cpu", timeout_s=timeout_s, **parameters)
        except labkit.RankFailed as failure:
            problem = _failure_reason(failure, folder, ranks, waiting, hints or {})
        except labkit.RunTimedOut as stopped:
            problem = _timeout_reason(stopped, answers, waiting)
        done = _ranks_with_output(folder, ranks)
        if not problem and len(done) < ranks:
            problem = f"rank {min(set(range(ranks)) - set(done))} {EARLY_EXIT_TEXT}"
        for index in done if EARLY_EXIT_TEXT not in problem else ():
            judge(index, torch.load(output_path(folder, index), weights_only=True))
        if problem:
            raise WrongAnswer(problem)


def _ranks_with_output(folder: Path, ranks: int) -> list[int]:
    """The ranks that have sent something home."""
    return [index for index in range(ranks) if output_path(folder, index).exists()]


def pack_answers(answers: Sequence[Callable[..., Any]]) -> bytes:
    """Functions as ``payload.unpack_payload`` reads them.

    Raises:
        Wrong: they use something that cannot leave this process.
    """
    try:
        return payload_pickling.pack_payload(
            {f"answer {number}": answer for number, answer in enumerate(answers)}
        )
    except payload_pickling.PayloadError as error:
        names = " and ".join(map(answer_name, answers))
        said = (
            f"{names} cannot be sent to the ranks with what is used there:"
            f" {error_text(error.__cause__ or error)}"
        )
        used = {
            name
            for answer in answers
            if hasattr(answer, "__code__")
            for name in answer.__code__.co_names
        }
        # a notebook's exit holds all of the notebook
        raise WrongAnswer(
            f"{said}. Does it call exit()?" if used & {"exit", "quit"} else said
        ) from error


def _failure_reason(
    failure: labkit.RankFailed, folder: Path, ranks: int, waiting: str, hints: Mapping[str, str]
) -> str:
    """What made a rank fail: its own error, or another rank that was no longer there."""
    if failure.exc_type == WrongAnswer.__name__:
        return failure.message
    run = RunFolder(failure.log.parent)
    if read_json(run.error(failure.rank)).get("echo"):
        done, failures = (
            _ranks_with_output(folder, ranks),
            read_json(run.exit_json()).get("failures"),
        )
        # a rank that torchrun ended is among its failures; without them nobody knows who left by
        # itself
        ended = {*done, *(end["rank"] for end in failures)} if failures else set(range(ranks))
        gone = [
            index for index in range(ranks) if index not in ended and not run.error(index).exists()
        ]
        if gone:
            return f"rank {' or '.join(map(str, gone))} {EARLY_EXIT_TEXT}"
        if done:
            return f"rank {failure.rank} waited for rank {done[0]}, which was done: {waiting}"
    error = f"{failure.exc_type}: {failure.message}" if failure.message else failure.exc_type
    hint = next((hint for part, hint in hints.items() if part in error), "")
    return f"{hint} ({error})" if hint else f"on rank {failure.rank}, {error}"


def _timeout_reason(
    stopped: labkit.RunTimedOut, answers: Sequence[Callable[..., Any]], waiting: str
) -> str:
    """What the ranks did when they were stopped: one was in a loop of the answer, or they waited
    for each other.

    Raises:
        NotJudged: a rank did neither, but was still importing or computing something else.
    """
    own = {
        (code.co_filename, code.co_name): code
        for each in answers
        if (code := getattr(each, "__code__", None))
    }
    frames = {
        index: _innermost_frame(stack, own) for index, stack in sorted(stopped.stacks.items())
    }
    for index, (file, line, name, text) in frames.items():
        if (file, name) in own:
            number = line - own[file, name].co_firstlineno + 1
            where = f"rank {index} was still in line {number} of {name}, `{text}`"
            return f"after {stopped.timeout_s:g} s {where}: when does its loop end?"
    for index, stack in stopped.stacks.items():
        if not any(frames[index]) and not stack.startswith(RANK_ENDED_TEXT):
            where = f"rank {index} was outside your function and waited for nobody"
            raise NotJudged(
                f"after {stopped.timeout_s:g} s {where}: this machine is busy; run the check again"
            )
    return f"the ranks waited for each other for {stopped.timeout_s:g} s: {waiting}"


def _innermost_frame(stack: str, own: Mapping[tuple[str, str], Any]) -> tuple[str, int, str, str]:
    """The innermost frame of a stack that waits or is an answer's: file, line, function, text;
    empty for none.
    """
    for thread in THREAD_PATTERN.split(stack):
        for file, line, name in FRAME_PATTERN.findall(thread):  # the innermost first
            text = linecache.getline(file, int(line)).strip()
            if "torch/distributed" in file or re.search(
                r"\bwait\(", text
            ):  # a request has no frame of its own
                return file, int(line), "", text
            if (file, name) in own or name == save_answer_output.__name__:
                return file, int(line), name, text
    return "", 0, "", ""
