"""Cases of one test of which a few are enough for most days."""

import datetime
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import pytest


def long_but(daily: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, for ``pytest.mark.parametrize``: these run daily, the others are marked long.

    Raises:
        ValueError: a case that should run daily is none of the cases.
    """
    found = list(cases)
    if missing := [case for case in daily if case not in found]:
        raise ValueError(f"{missing} are none of the cases {found}")
    return [case if case in daily else with_mark(case) for case in found]


TODAY = datetime.date.today().toordinal()


def share_of_today(cases: Iterable[Any], parts: int) -> list[Any]:
    """One of so many parts of the cases, another each day; with ``make test ALL=1`` it is all of them."""
    if os.environ.get("LABKIT_TEST") == "all":
        return list(cases)
    return list(cases)[TODAY % parts :: parts]


def half_of_today(cases: Iterable[Any]) -> list[Any]:
    """What a test takes of its own, of which conftest.py runs a seventh of the cases.

    Within two weeks a half and a seventh meet in every pair; two sevenths of the same day never would.
    """
    return share_of_today(cases, 2)


def seventh_of_today(tests: Iterable[Sequence[Any]]) -> list[Any]:
    """A seventh of the cases of each test that has seven or more, and a seventh of all others together."""
    many, few = [], []
    for cases in tests:
        (many if len(cases) > 6 else few).append(cases)
    return [case for cases in [*many, [*chain(*few)]] for case in share_of_today(cases, 7)]


def with_mark(case: Any) -> Any:
    """A case, which may be a tuple of several values, with the mark ``long``."""
    return pytest.param(*case if isinstance(case, tuple) else [case], marks=pytest.mark.long)


WARM_DAILY = long_but(["warm"], ["warm", "cold"])
"""For ``pytest.mark.parametrize("both_ways", WARM_DAILY, indirect=True)``: cold only in the long tier."""
