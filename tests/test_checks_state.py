"""What a learner's earlier cell has left in the process changes no verdict, and breaks no check."""

import contextlib
import random
import sys
import warnings

import numpy
import pytest
import torch
from fixture_long import half_of_today, long_but
from test_exercises import EXERCISES, answer  # noqa: F401  (a fixture)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def seeds_and_threads():
    threads = torch.get_num_threads()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1), torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def empty_path():
    path = list(sys.path)
    sys.path.clear()
    try:
        yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


LEFT_BEHIND = {
    "float64 as default dtype": default_dtype,
    "meta as default device": default_device,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "seeds, one thread, deterministic algorithms": seeds_and_threads,
    "an empty sys.path": empty_path,
    "warnings as errors": warnings_as_errors,
}
DAILY = ["0.1", "1.4", "2.4", "3.9", "4.5", "5.1", "7.2"]
"""Exercises that are asked by every ``make test``; the long tier asks the others."""


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("left", long_but(["meta as default device", "no_grad", "an empty sys.path"], LEFT_BEHIND))
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_what_a_cell_left_in_the_process_changes_no_verdict(left, some, answer):  # noqa: F811
    asked = [each for each in EXERCISES if (each.number in DAILY) == some]
    asked = asked if some else half_of_today(asked)
    verdicts = {}
    for exercise in asked:
        right, wrong = answer(exercise), answer(exercise, next(iter(exercise.wrong.values())))
        with LEFT_BEHIND[left]():
            verdicts[exercise.number] = exercise.check(right).state, exercise.check(wrong).state
    others = {number: each for number, each in verdicts.items() if each != ("passed", "wrong")}
    assert verdicts and not others
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


def test_a_check_leaves_the_process_as_it_was(answer):  # noqa: F811
    (exercise,) = [each for each in EXERCISES if each.number == "0.2"]
    right = answer(exercise)
    with default_dtype(), empty_path(), torch.no_grad():
        draws = torch.get_rng_state()
        assert exercise.check(right).ok
        assert (torch.get_default_dtype(), sys.path, torch.is_grad_enabled()) == (torch.float64, [], False)
        assert torch.equal(torch.get_rng_state(), draws)
