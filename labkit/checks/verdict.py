"""What a check says, and how it tells an empty answer from a wrong one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real  # numpy's numbers are among them
from typing import Any

COLOURS = {"passed": "#00734F", "wrong": "#B3261E", "not attempted": "#5F5F5F"}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        state: "passed", "wrong" or "not attempted".
        detail: what was seen, or what is wrong and where to look.
    """

    state: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer is right."""
        return self.state == "passed"

    def __repr__(self) -> str:
        return f"{self.state}: {self.detail}" if self.detail else self.state

    def _repr_html_(self) -> str:
        colour = COLOURS[self.state]
        return f'<p style="color:{colour}"><b>{self.state}</b> {escape(self.detail)}</p>'


def passed(detail: str) -> Verdict:
    """A right answer, with what was seen."""
    return Verdict("passed", detail)


def wrong(detail: str) -> Verdict:
    """A wrong answer, with what is wrong and a hint."""
    return Verdict("wrong", detail)


def is_empty(answer: Callable[..., Any]) -> bool:
    """Whether a function's body is nothing but ``...``, ``pass`` and a docstring."""
    definition = ast.parse(source_of(answer)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return all(
        isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in definition.body
    )


def source_of(answer: Callable[..., Any]) -> str:
    """The text of a function defined in a notebook cell or a file, flush left."""
    return textwrap.dedent(inspect.getsource(answer))


def check_values(answer: Callable[..., Any], cases: Sequence[tuple[dict[str, Any], float, str]]) -> Verdict:
    """Call the answer with each case's arguments and hold the value against the expected one.

    Args:
        answer: the learner's function.
        cases: arguments, expected value, and a hint for who gets this case wrong.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    for arguments, expected, hint in cases:
        call = f"{answer.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        try:
            value = answer(**arguments)
        except Exception as error:
            return wrong(f"{call} raised {type(error).__name__}: {error}")
        if not isinstance(value, Real):
            return wrong(f"{call} gave {value!r}, not a number: does every path return?")
        if value != expected:
            return wrong(f"{call} gave {value:,}, expected {expected:,}. {hint}")
    return passed(f"{len(cases)} cases agree")
