"""What continuous integration leaves out on one day it runs on another: also a share of a share."""

from itertools import chain, product

import fixture_long
import pytest
from fixture_long import fifth_of_today, half_of_today, share_of_today
from test_notebooks import ELSEWHERE, LABS


@pytest.fixture
def ten_days(monkeypatch):
    """Ten days in a row, each of which is today while a loop has it."""
    monkeypatch.setenv("LABKIT_TEST", "today")
    return (monkeypatch.setattr(fixture_long, "TODAY", day) for day in range(100, 110))


def test_ten_days_meet_every_case_of_a_test_with_all_that_it_asks(ten_days):
    met = {pair for _ in ten_days for pair in product(share_of_today(range(13), 5), half_of_today(range(82)))}
    assert met == {*product(range(13), range(82))}


def test_five_days_run_every_case_once_also_of_tests_that_have_few(ten_days):
    tests = ["abcdefgh", "i", "jk", "l", "mn", "o"]
    days = [fifth_of_today(tests) for _ in ten_days]
    assert sorted(chain(*days[:5])) == list("abcdefghijklmno")
    assert all(2 <= len(day) <= 4 for day in days)


def test_ten_days_run_every_unsolved_lab_a_second_time(ten_days):
    unsolved = [lab for lab in LABS if lab.name not in ELSEWHERE]
    twice = [lab for _ in ten_days for lab in share_of_today(unsolved, 5) if lab in half_of_today(LABS)]
    assert sorted(lab.name for lab in twice) == [lab.name for lab in unsolved]
