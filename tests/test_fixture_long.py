"""What continuous integration leaves out on one day it runs on another: also a share of a share."""

from itertools import chain, product

import fixture_long
import pytest
from fixture_long import half_of_today, seventh_of_today, share_of_today
from test_notebooks import ELSEWHERE, LABS


@pytest.fixture
def two_weeks(monkeypatch):
    """Fourteen days in a row, each of which is today while a loop has it."""
    monkeypatch.setenv("LABKIT_TEST", "today")
    return (monkeypatch.setattr(fixture_long, "TODAY", day) for day in range(100, 114))


def test_two_weeks_meet_every_case_of_a_test_with_all_that_it_asks(two_weeks):
    met = {pair for _ in two_weeks for pair in product(share_of_today(range(13), 7), half_of_today(range(82)))}
    assert met == {*product(range(13), range(82))}


def test_a_week_runs_every_case_once_also_of_tests_that_have_few(two_weeks):
    tests = ["abcdefgh", "i", "jk", "l", "mn", "o"]
    days = [seventh_of_today(tests) for _ in two_weeks]
    assert sorted(chain(*days[:7])) == list("abcdefghijklmno")
    assert all(1 <= len(day) <= 3 for day in days)


def test_two_weeks_run_every_unsolved_lab_a_second_time(two_weeks):
    unsolved = [lab for lab in LABS if lab.name not in ELSEWHERE]
    twice = [lab for _ in two_weeks for lab in share_of_today(unsolved, 7) if lab in half_of_today(LABS)]
    assert sorted(lab.name for lab in twice) == [lab.name for lab in unsolved]
