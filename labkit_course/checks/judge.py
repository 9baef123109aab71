"""What all checks share: they call the learner's function, whatever it does, and return a verdict.

A check is a function such as this:

    @exercise
    def double(answer: Callable[..., int]) -> Verdict:
        found = call_answer(answer, 3)
        expect(found == 6, f"double(3) gave {value_text(found)}", expected=6)
        return passing_verdict("one case agrees")
"""

import dis
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from html import escape

# NumPy's numbers are registered with these two.
from numbers import Integral, Real
from types import CodeType
from typing import Any, ParamSpec
from unittest import mock

import torch

# Bound at import, because an answer may replace torch.allclose, and must not judge itself.
from torch import Tensor, allclose

from labkit.errors import LabError
from labkit.torch_private import tree_leaves
from labkit_course import verdict_store

# JupyterLab's own colours can be read in its dark theme, too; elsewhere the second one counts.
GREY = "var(--jp-ui-font-color2, #5F5F5F)"
GREEN, RED = "var(--jp-success-color0, #00734F)", "var(--jp-error-color1, #B3261E)"
COLOURS = {"passed": GREEN, "wrong": RED, "not attempted": GREY, "not judged": GREY}
MAX_TEXT_LENGTH = 300
EMPTY_BODY_OPCODES = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}
# nbgrader sets it for the kernels of `autograde` and `validate`.
ENV_NBGRADER = "NBGRADER_EXECUTION"
Parameters = ParamSpec("Parameters")
# Where Python found labkit; a learner's cell may empty sys.path.
IMPORT_PATH = list(sys.path)
# Calls in words, and what they have returned, since the check began.
_returned: list[tuple[str, Any]] = []


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check; in a notebook, the hint and the expected value open on request."""

    # A key of COLOURS; "not judged" if the machine was too busy to tell.
    state: str
    # What was seen, what should have been seen instead, such as "4 tensors", and where to look.
    detail: str = ""
    expected: str = ""
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer is right."""
        return self.state == "passed"

    def __repr__(self) -> str:
        seen = f"{self.detail}, expected {self.expected}" if self.expected else self.detail
        end = " " if seen.endswith("?") else ". "
        text = end.join(filter(None, [seen.rstrip(".") if self.hint else seen, self.hint]))
        return f"{self.state}: {text}" if text else self.state

    def _repr_html_(self) -> str:
        folds = "".join(
            f"<details><summary>{name}</summary>{escape(text)}</details>"
            for name, text in (("Hint", self.hint), ("Expected", self.expected))
            if text
        )
        state = f'<p style="color:{COLOURS[self.state]}"><b>{self.state}</b>'
        return f"{state} {escape(self.detail)}</p>{folds}"


class _NbgraderVerdict(Verdict):
    """A verdict that is printed, because nbgrader would read points from a cell's value."""

    def _ipython_display_(self) -> None:
        print(self)


class WrongAnswer(Exception):
    """The answer is wrong; the message tells what was seen. See Verdict for the other arguments."""

    def __init__(self, seen: str, *, expected: str = "", hint: str = ""):
        super().__init__(seen)
        self.expected, self.hint = expected, hint


class NotAttempted(Exception):
    """The answer's body is still empty."""


class NotJudged(Exception):
    """The check could not decide; the message says why, and what to do."""


class NotPassed(Exception):
    """Raised under nbgrader, which counts a cell as right unless it raises."""


def expect(ok: bool, seen: str, expected: object = "", hint: str = "") -> None:
    """Raise WrongAnswer unless ``ok``; ``expected`` is shown as text."""
    if not ok:
        raise WrongAnswer(seen, expected=str(expected), hint=hint)


@contextmanager
def expect_no_error(seen: str, expected: object = "", hint: str = "") -> Iterator[None]:
    """Raise WrongAnswer if the block raises: what an answer returned cannot be read."""
    try:
        yield
    except Exception:
        raise WrongAnswer(seen, expected=str(expected), hint=hint) from None


def passing_verdict(detail: str) -> Verdict:
    """Return the verdict on a right answer, with what was seen."""
    return Verdict("passed", detail)


def exercise(check: Callable[Parameters, Verdict]) -> Callable[Parameters, Verdict]:
    """Return the verdict on whatever the check raises, and record it under the lab's exercise.

    The lab's name is the module's, or the module's LAB.
    """
    lab = check.__globals__.get("LAB", check.__module__.rpartition(".")[2])

    @functools.wraps(check)
    def judge_answer(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Verdict:
        _returned.clear()
        try:
            with clean_process_state():
                verdict = check(*args, **kwargs)
        except NotAttempted:
            verdict = Verdict("not attempted")
        except NotJudged as reason:
            verdict = Verdict("not judged", str(reason))
        except WrongAnswer as reason:
            verdict = Verdict("wrong", str(reason), reason.expected, reason.hint)
        except Exception as error:
            # An answer may return anything, such as an object that raises when it is compared. Of
            # the system's own errors, such as a full disk, each has a number.
            is_ours = isinstance(error, LabError) or getattr(error, "errno", None) is not None
            if is_ours or not _returned:
                raise
            asked, value = _returned[-1]
            said = f"{asked} gave {value_text(value)}, which cannot be compared"
            verdict = Verdict("wrong", f"{said}: {error_text(error)}")
        answer = next(iter([*args, *kwargs.values()]), None)
        # A notebook also shows the verdicts on broken functions; no exercise has their names.
        is_exercise = verdict_store.store_verdict(lab, _safe_answer_name(answer), verdict.state)
        if not is_exercise or not os.environ.get(ENV_NBGRADER):
            return verdict
        if not verdict.ok:
            raise NotPassed(repr(verdict))
        return _NbgraderVerdict(**vars(verdict))

    return judge_answer


@contextmanager
def clean_process_state() -> Iterator[None]:
    """Undo inside the block what a learner's earlier cell may have set for the whole process."""
    dtype, path, draws = torch.get_default_dtype(), list(sys.path), torch.get_rng_state()
    sys.path += [each for each in IMPORT_PATH if each not in sys.path]
    torch.set_default_dtype(torch.float32)
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            yield
        finally:
            sys.path[:] = path
            torch.set_default_dtype(dtype)
            torch.set_rng_state(draws)


def _safe_answer_name(answer: object) -> str:
    # An answer may be any object, even one whose name raises or is no text.
    try:
        name = answer_name(answer)
    except Exception:
        return ""
    return name if type(name) is str else ""


def raise_if_not_attempted(answer: object) -> None:
    """Raise NotAttempted for an empty function, WrongAnswer for what cannot return a value."""
    hand_over = "is no function: hand over the function by its name, without calling it"
    expect(callable(answer), f"{value_text(answer)} {hand_over}")
    # Its body would not run when called.
    if inspect.iscoroutinefunction(answer):
        wrong = "is an async function, which gives a coroutine when called: write def alone"
        raise WrongAnswer(f"{answer_name(answer)} {wrong}")
    code = getattr(answer, "__code__", None)
    if code and is_empty_code(code):
        raise NotAttempted


def is_empty_code(code: CodeType) -> bool:
    """Tell whether a function's body does nothing."""
    return all(map(_is_empty_instruction, dis.get_instructions(code)))


def _is_empty_instruction(instruction: dis.Instruction) -> bool:
    name = instruction.opname
    return name in EMPTY_BODY_OPCODES and ("CONST" not in name or instruction.argval is None)


def call_answer(
    answer: Callable[..., Any], *args: Any, in_words: str = "", hint: str = "", **kwargs: Any
) -> Any:
    """Return the answer's result; raise NotAttempted for an empty one, WrongAnswer if it raises.

    ``in_words`` is the call as a learner reads it, by default with all arguments; ``hint`` is shown
    if the answer raises a RuntimeError.
    """
    raise_if_not_attempted(answer)
    try:
        with _prevent_kernel_exit():
            value = answer(*args, **kwargs)
        _returned.append((in_words or _safe_answer_name(answer), value))
        return value
    except KeyboardInterrupt:
        # The learner pressed the stop button.
        raise
    except BaseException as error:
        # BaseException, because SystemExit would end the notebook's kernel.
        said = f"{in_words or call_text(answer, *args, **kwargs)} raised {error_text(error)}"
        raise WrongAnswer(said, hint=hint if isinstance(error, RuntimeError) else "") from error


def _prevent_kernel_exit() -> AbstractContextManager[Any]:
    # In a notebook exit() stops the kernel; here it shall raise SystemExit, as in a program.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return mock.patch.object(shell, "ask_exit", side_effect=SystemExit) if shell else nullcontext()


def answer_name(answer: object) -> str:
    """Return a function's name, or the type of another object."""
    return getattr(answer, "__name__", type(answer).__name__)


def call_text(answer: object, *args: Any, **kwargs: Any) -> str:
    """Return a call as a learner would write it."""
    named = [f"{name}={_argument_text(value)}" for name, value in kwargs.items()]
    given = [*map(_argument_text, args), *named]
    return f"{answer_name(answer)}({', '.join(given)})"


def _argument_text(value: object) -> str:
    # repr writes 400 TFLOP/s with all its zeros.
    is_large = isinstance(value, float) and value >= 1e6
    return f"{value:g}" if is_large else repr(value)


def error_text(error: BaseException) -> str:
    """Return an exception's type and message."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def value_text(value: object) -> str:
    """Format any value, numbers with commas, in at most a few lines; it never raises."""
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
    """Tell whether a value is a tensor of another's shape and, up to rounding, with its numbers."""
    if got is None:
        return False
    return got.shape == expected.shape and allclose(
        got.to(expected.dtype), expected, rtol=rtol, atol=atol
    )


def projection(found: Tensor, right: Tensor) -> float:
    """Return the factor with which ``right`` comes nearest to ``found``."""
    return float((found * right).sum() / right.square().sum())


def is_close(found: Any, right: Any, *, rtol: float = 1e-4, atol: float = 1e-6) -> bool:
    """Tell whether numbers, tensors or lists of them agree, up to rounding."""
    if isinstance(right, Tensor):
        return is_tensor_close(found, right, rtol=rtol, atol=atol)
    if isinstance(right, list):
        agree = functools.partial(is_close, rtol=rtol, atol=atol)
        return len(found) == len(right) and all(map(agree, found, right))
    try:
        return bool(found == right) or math.isclose(found, right, rel_tol=rtol, abs_tol=atol)
    except (OverflowError, TypeError):
        # An integer of hundreds of digits is no float, and None no number.
        return False


def expect_tensor(
    got: Tensor | str, expected: Tensor, hint: str = "", name: str = "the function"
) -> Tensor:
    """Return a tensor of the expected shape; ``got`` is one, or the name of another type."""
    if not isinstance(got, Tensor):
        said = f"{name} returned {got}, not a tensor"
        raise WrongAnswer(said, hint="Does every path return the tensor?")
    expect(got.shape == expected.shape, f"the shape is {(*got.shape,)}", (*expected.shape,), hint)
    expect(got.dtype == expected.dtype, f"the numbers are {got.dtype}", expected.dtype)
    return got


def expect_close(
    got: Any,
    right: Any,
    seen: str,
    likely: Mapping[str, Any],
    otherwise: str = "is wrong",
    expected: object = "",
    hint: str = "",
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Raise WrongAnswer unless a value is right: ``seen``, and the words of the likely mistake.

    Values are those of ``is_close``. ``likely`` holds wrong ones by these words, or pairs of one
    and its own hint; the first that is close names the mistake.
    """
    if is_close(got, right, rtol=rtol, atol=atol):
        for each, wanted in zip(tree_leaves(got), tree_leaves(right), strict=True):
            if isinstance(wanted, Tensor):
                verb = "" if seen.endswith((" is", " are")) else " is"
                said = f"{seen}{verb} right, but in {each.dtype}"
                expect(each.dtype == wanted.dtype, said, wanted.dtype)
        return
    words, shown_hint = otherwise, hint
    for each, mistake in likely.items():
        wrong, own_hint = mistake if isinstance(mistake, tuple) else (mistake, hint)
        if is_close(got, wrong, rtol=rtol, atol=atol):
            words, shown_hint = each, own_hint
            break
    raise WrongAnswer(f"{seen} {words}", expected=str(expected), hint=shown_hint)


def likely_hint(found: Any, likely: Mapping[str, Any], rtol: float = 1e-6) -> str:
    """Return the hint whose wrong value was found, or "" if there is none."""
    return next((hint for hint, wrong in likely.items() if is_close(found, wrong, rtol=rtol)), "")


def judge_cases(
    answer: Callable[..., Any],
    right: Callable[..., float],
    cases: Sequence[tuple[Any, ...]],
    likely: Callable[..., Mapping[str, float]] = lambda *values: {},
    rtol: float = 1e-9,
) -> Verdict:
    """Compare the answer's numbers with the right ones, up to rounding, so that the order of
    operations is free.

    A case holds the arguments of ``right``, which names them, and a hint. ``likely`` returns wrong
    numbers for the same arguments, by words that name the mistake.
    """
    for *values, hint in cases:
        arguments = dict(zip(inspect.signature(right).parameters, values, strict=True))
        asked, expected = call_text(answer, **arguments), right(*values)
        found = call_answer(answer, in_words=asked, **arguments)
        shown = value_text(found)
        no_number = f"{asked} gave {shown}, not a number: does every path return?"
        expect(isinstance(found, Real), no_number)
        # Whole numbers are shown to the last digit.
        exact = isinstance(expected, Integral)
        wanted = value_text(expected) if exact else f"{expected:,.6g}"
        mistakes = {f"{shown}, {words}": value for words, value in likely(*values).items()}
        said = f"{asked} gave"
        expect_close(found, expected, said, mistakes, shown, wanted, hint, rtol=rtol, atol=0)
    return passing_verdict(f"{len(cases)} cases agree")
