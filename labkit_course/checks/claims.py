"""Record a learner's predictions before a run, and compare a lab's claims with its result."""

import os
import warnings
from numbers import Real
from typing import Any

from labkit.environment import ENV_STRICT_CLAIMS
from labkit_course.checks.judge import error_text


def commit(**numbers: Any) -> dict[str, float | None]:
    """Return your predictions by name, for ``plots.table(..., yours=...)``.

    Each is a number, None, or a function that computes a number from one of your answers. While
    that answer is empty, the prediction is None.
    """
    return {name: _prediction_value(name, value) for name, value in numbers.items()}


def prediction_text(prediction: float | None, spec: str = "") -> str:
    """Return a prediction as text, formatted by ``spec``, or "no prediction".

    Without ``spec``, small numbers keep the digits with which they were written.
    """
    if prediction is None:
        return "no prediction"
    rounds_nothing = prediction == round(prediction) or abs(prediction) >= 1000
    return format(prediction, spec or (",.0f" if rounds_nothing else ".4g"))


def _prediction_value(name: str, value: Any) -> float | None:
    if callable(value):
        try:
            value = value()
        except TypeError as error:
            # An empty answer returns None, and arithmetic with None raises TypeError.
            if "NoneType" in str(error):
                return None
            raise
        except Exception as error:
            said = f"{name}: your function raised {error_text(error)}; it counts as None"
            warnings.warn(said, stacklevel=4)
            return None
    if value is None or value is ...:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        allowed = "commit to a number, None, or a function that gives one"
        raise TypeError(f"{name} = {value!r} is no number: {allowed}")
    return float(value)


def claim(sentence: str, holds: bool, *, where: bool = True) -> None:
    """Print a sentence of the lab if the measurement contradicts it, as it may on another machine.

    ``where`` tells whether the sentence speaks of the parameters at hand.

    Raises:
        AssertionError: the sentence speaks of these parameters and does not hold, and
            LABKIT_STRICT_CLAIMS is 1.
    """
    if holds:
        return
    if not where:
        print(f"Said of other parameters than these: {sentence}")
        return
    if os.environ.get(ENV_STRICT_CLAIMS) == "1":
        raise AssertionError(f"the claim does not hold: {sentence}")
    print(f"Not so in this run, on this machine: {sentence}")
