"""How a check asks: it calls the learner's function, whatever that is and does, and ends in a
verdict.

@exercise
def double(answer: Callable[..., int]) -> Verdict:
    found = call(answer, 3)
    if found != 6:
        raise Wrong(f"double(3) gave {shown(found)}, expected 6")
    return passed("one case agrees")
"""

import dis
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from html import escape

# NumPy's numbers are registered with these two.
from numbers import Integral, Real
from typing import Any, ParamSpec
from unittest import mock

# Bound at import, because an answer may replace torch.allclose, and must not judge itself.
from torch import (
    Tensor,
    allclose,
)

from labkit.course import verdict_store

COLOURS = {
    "passed": "#00734F",
    "wrong": "#B3261E",
    "not attempted": "#5F5F5F",
    "not judged": "#5F5F5F",
}
MAX_TEXT_LENGTH = 300
EMPTY_BODY_OPCODES = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}
ENV_NBGRADER = "NBGRADER_EXECUTION"
"""Environment variable that nbgrader sets for the kernels of `autograde` and `validate`."""
Parameters = ParamSpec("Parameters")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    A notebook shows what was seen, and opens the hint and what was expected on request; as text it
    is all there.

    Attributes:
        state: "passed", "wrong", "not attempted", or "not judged" where the machine was too busy to
            tell.
        detail: what was seen.
        expected: what should have been seen instead, such as "expected 4".
        hint: where to look.
    """

    state: str
    detail: str = ""
    expected: str = ""
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer is right."""
        return self.state == "passed"

    def __repr__(self) -> str:
        seen = ", ".join(filter(None, [self.detail, self.expected]))
        text = ". ".join(filter(None, [seen.rstrip(".") if self.hint else seen, self.hint]))
        return f"{self.state}: {text}" if text else self.state

    def _repr_html_(self) -> str:
        colour = COLOURS[self.state]
        steps = {"Hint": self.hint, "Expected": self.expected.removeprefix("expected ")}
        opened = [
            f"<details><summary>{name}</summary>{escape(text)}</details>"
            for name, text in steps.items()
            if text
        ]
        return (
            f'<p style="color:{colour}"><b>{self.state}</b>'
            f" {escape(self.detail)}</p>{''.join(opened)}"
        )


class WrongAnswer(Exception):
    """The answer is wrong; the message, for the learner, is what was seen. See Verdict for the
    rest.
    """

    def __init__(self, seen: str, *, expected: str = "", hint: str = ""):
        super().__init__(seen)
        self.expected, self.hint = expected, hint


class NotAttempted(Exception):
    """The answer's body is still empty."""


class NotJudged(Exception):
    """Nobody knows whether the answer is right; the message says why, and what to do."""


class NotPassed(Exception):
    """Raised where nbgrader grades, which counts a cell as right unless it raises; the message is
    the verdict.
    """


def passing_verdict(detail: str) -> Verdict:
    """A right answer, with what was seen."""
    return Verdict("passed", detail)


def exercise(check: Callable[Parameters, Verdict]) -> Callable[Parameters, Verdict]:
    """A check whose ``Wrong``, ``NotAttempted`` and ``NotJudged`` become verdicts, which are kept
    for the learner.

    Kept are those of answers whose name is an exercise's of the lab: a notebook also hands broken
    functions to a check, to show what it says. The lab is named as its module, or as the module's
    LAB where the module stands elsewhere.
    """
    lab = check.__globals__.get("LAB", check.__module__.rpartition(".")[2])

    @functools.wraps(check)
    def judge_answer(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Verdict:
        try:
            verdict = check(*args, **kwargs)
        except NotAttempted:
            verdict = Verdict("not attempted")
        except NotJudged as reason:
            verdict = Verdict("not judged", str(reason))
        except WrongAnswer as reason:
            verdict = Verdict("wrong", str(reason), reason.expected, reason.hint)
        answer = next(iter([*args, *kwargs.values()]), None)
        is_exercise = verdict_store.store_verdict(lab, _safe_answer_name(answer), verdict.state)
        if is_exercise and os.environ.get(ENV_NBGRADER):
            return _nbgrader_verdict(verdict)
        return verdict

    return judge_answer


class _NbgraderVerdict(Verdict):
    """A pass that is printed: nbgrader reads points out of a value that a cell shows."""

    def _ipython_display_(self) -> None:
        print(self)


def _nbgrader_verdict(verdict: Verdict) -> Verdict:
    if not verdict.ok:
        raise NotPassed(repr(verdict))
    return _NbgraderVerdict(**vars(verdict))


def _safe_answer_name(answer: object) -> str:
    """An answer's name, whatever the answer is; "" for none."""
    try:
        name = answer_name(answer)
    except Exception:
        return ""
    return name if type(name) is str else ""


def raise_if_not_attempted(answer: object) -> None:
    """Raise NotAttempted for a function with nothing in it, Wrong for what cannot be called and
    give a value.
    """
    if not callable(answer):
        raise WrongAnswer(
            f"{value_text(answer)} is no function: hand over the function by its name, without"
            " calling it"
        )
    if inspect.iscoroutinefunction(answer):
        raise WrongAnswer(
            f"{answer_name(answer)} is an async function, which gives a coroutine when called:"
            " write def alone"
        )
    code = getattr(answer, "__code__", None)
    if code and all(
        each.opname in EMPTY_BODY_OPCODES and _is_empty_instruction(each)
        for each in dis.get_instructions(code)
    ):
        raise NotAttempted


def _is_empty_instruction(instruction: dis.Instruction) -> bool:
    return "CONST" not in instruction.opname or instruction.argval is None


def call_answer(
    answer: Callable[..., Any], *args: Any, in_words: str = "", hint: str = "", **kwargs: Any
) -> Any:
    """What an answer gives for these arguments.

    Args:
        answer: the learner's function.
        *args: its arguments.
        in_words: the call as a learner reads it; by default, with all arguments.
        hint: for an answer that raises a RuntimeError.
        **kwargs: more arguments.

    Raises:
        NotAttempted: the answer is empty.
        Wrong: it is no function, or raised something.
    """
    raise_if_not_attempted(answer)
    try:
        with _prevent_kernel_exit():
            return answer(*args, **kwargs)
    except KeyboardInterrupt:
        # The learner pressed the stop button.
        raise
    except BaseException as error:
        # BaseException, because SystemExit would end the notebook's kernel.
        said = f"{in_words or call_text(answer, *args, **kwargs)} raised {error_text(error)}"
        raise WrongAnswer(said, hint=hint if isinstance(error, RuntimeError) else "") from error


def _prevent_kernel_exit() -> AbstractContextManager[Any]:
    """Lets exit() of a notebook, which would ask its kernel to stop and return, raise SystemExit as
    elsewhere.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return mock.patch.object(shell, "ask_exit", side_effect=SystemExit) if shell else nullcontext()


def judge_values(
    answer: Callable[..., Any],
    right: Callable[..., float],
    cases: Sequence[tuple[Any, ...]],
    hints: str | Sequence[str],
) -> Verdict:
    """Call the answer with each case's arguments, by name, and hold its number against the right
    one.

    Args:
        answer: the learner's function.
        right: gives the right number for the same arguments, and their names.
        cases: arguments.
        hints: for who gets a case wrong; one for each case, or one for all.

    Raises:
        NotAttempted: the answer is empty.
        Wrong: at the first case that does not agree.
    """
    names = inspect.signature(right).parameters
    each_hint = [hints] * len(cases) if isinstance(hints, str) else hints
    for case, hint in zip(cases, each_hint, strict=True):
        arguments, expected = dict(zip(names, case, strict=True)), right(*case)
        in_words = call_text(answer, **arguments)
        found = call_answer(answer, in_words=in_words, **arguments)
        if not isinstance(found, Real):
            raise WrongAnswer(
                f"{in_words} gave {value_text(found)}, not a number: does every path return?"
            )
        if found != expected:
            raise WrongAnswer(
                f"{in_words} gave {value_text(found)}", expected=f"expected {expected:,}", hint=hint
            )
    return passing_verdict(f"{len(cases)} cases agree")


def answer_name(answer: object) -> str:
    """What to call an answer: a function's name, or the type of another object."""
    return getattr(answer, "__name__", type(answer).__name__)


def call_text(answer: object, *args: Any, **kwargs: Any) -> str:
    """A call as its learner would write it."""
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{answer_name(answer)}({', '.join(given)})"


def error_text(error: BaseException) -> str:
    """An exception's type and message."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def value_text(value: object) -> str:
    """Any value in words: numbers with commas, nothing longer than a few lines, and never an
    error.
    """
    try:
        if isinstance(value, Integral) and abs(int(value)) >= 10**30:
            return f"a number of {math.floor(math.log10(abs(int(value)))) + 1:,} digits"
        # Before Python 3.12 a Fraction cannot be formatted with commas.
        if isinstance(value, bool | Fraction):
            return str(value)
        text = f"{value:,}" if isinstance(value, Real) else repr(value)
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}…"


def is_tensor_close(
    got: Tensor | None, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-8
) -> bool:
    """Whether there is a tensor that agrees with another in shape and, but for rounding, in its
    numbers.
    """
    if got is None:
        return False
    return got.shape == expected.shape and allclose(
        got.to(expected.dtype), expected, rtol=rtol, atol=atol
    )
