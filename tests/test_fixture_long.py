"""What continuous integration leaves out on one day it runs on another: also a share of a share."""

from itertools import chain, product

import fixture_long
import pytest
from fixture_long import half_of_today, share_of_today, third_of_today
from test_notebooks import ELSEWHERE, LABS


@pytest.fixture
def six_days(monkeypatch):
    """Six days in a row, each of which is today while a loop has it."""
    monkeypatch.setenv("LABKIT_TEST", "today")
    return (monkeypatch.setattr(fixture_long, "TODAY", day) for day in range(100, 106))


def test_six_days_meet_every_case_of_a_test_with_all_that_it_asks(six_days):
    met = {pair for _ in six_days for pair in product(share_of_today(range(13), 3), half_of_today(range(82)))}
    assert met == {*product(range(13), range(82))}


def test_three_days_run_every_case_once_also_of_tests_that_have_one_or_two(six_days):
    tests = ["abcdefgh", "i", "jk", "l", "mn", "o"]
    days = [third_of_today(tests) for _ in six_days]
    assert sorted(chain(*days[:3])) == list("abcdefghijklmno")
    assert all(4 <= len(day) <= 6 for day in days)


def test_six_days_run_every_unsolved_lab_a_second_time(six_days):
    unsolved = [lab for lab in LABS if lab.name not in ELSEWHERE]
    twice = [lab for _ in six_days for lab in share_of_today(unsolved, 3) if lab in half_of_today(LABS)]
    assert sorted(lab.name for lab in twice) == [lab.name for lab in unsolved]
