"""What a section of a lab asks for before a run, and what it says after: your numbers first, then
true sentences.
"""

import os
import warnings
from numbers import Real
from typing import Any

from labkit.checks.judge import error_text
from labkit.environment import ENV_STRICT_CLAIMS


def commit(**numbers: Any) -> dict[str, float | None]:
    """Your predictions by name, for ``plots.table(..., yours=...)``.

    Each is a number, None for none, or a function without arguments, usually a lambda, that
    computes one by an answer of yours. While that answer is empty its number is None, and the run
    goes on without.
    """
    return {name: _prediction_value(name, value) for name, value in numbers.items()}


def _prediction_value(name: str, value: Any) -> float | None:
    if callable(value):
        try:
            value = value()
        except TypeError as error:
            if "NoneType" in str(error):  # arithmetic with what an empty answer returned
                return None
            raise
        except Exception as error:
            warnings.warn(
                f"{name}: your function raised {error_text(error)}; it counts as None", stacklevel=4
            )
            return None
    if value is None or value is ...:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} = {value!r} is no number: commit to a number, None, or a function that"
            " gives one"
        )
    return float(value)


def claim(sentence: str, holds: bool) -> None:
    """Hold a sentence about a figure or a table against what was measured.

    Nothing is shown where it holds. Elsewhere, on another machine or with other parameters, the
    reader is told so.

    Raises:
        AssertionError: it does not hold, and LABKIT_STRICT_CLAIMS is 1.
    """
    if holds:
        return
    if os.environ.get(ENV_STRICT_CLAIMS) == "1":
        raise AssertionError(f"the claim does not hold: {sentence}")
    print(f"Not so in this run, on this machine: {sentence}")
