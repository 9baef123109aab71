"""labkit_course.checks.claims: the learner's own numbers, and sentences held against what was measured."""

import pytest

from labkit.environment import ENV_STRICT_CLAIMS
from labkit_course.checks.claims import claim, commit, prediction_text


def empty(rows):
    """An answer that is not written yet."""


def test_numbers_are_kept_and_functions_called():
    assert commit(bytes=12, ms=1.5, count=lambda: 2 * 3, none=None) == {
        "bytes": 12,
        "ms": 1.5,
        "count": 6,
        "none": None,
    }


def test_what_needs_an_empty_answer_is_none():
    assert commit(bytes=lambda: empty(3), more=lambda: 4 * empty(3)) == {"bytes": None, "more": None}
    assert commit(bytes=...) == {"bytes": None}, "a placeholder"


def test_an_answer_that_raises_is_none_and_says_so():
    with pytest.warns(UserWarning, match="bytes: your function raised ZeroDivisionError: division by zero"):
        assert commit(bytes=lambda: 1 / 0) == {"bytes": None}


@pytest.mark.parametrize("value", ["12", True, [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="is no number: commit to a number, None, or a function"):
        commit(bytes=value)


def test_a_wrong_call_of_an_answer_is_not_hidden():
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        commit(bytes=lambda: empty(1, 2))


def test_a_claim_is_silent_where_it_holds_and_told_where_not(capsys, monkeypatch):
    monkeypatch.delenv(ENV_STRICT_CLAIMS, raising=False)
    claim("2 ranks are faster", True)
    assert capsys.readouterr().out == ""
    claim("2 ranks are faster", False)
    assert capsys.readouterr().out == "Not so in this run, on this machine: 2 ranks are faster\n"


def test_a_claim_that_does_not_hold_is_an_error_in_tests(monkeypatch):
    monkeypatch.setenv(ENV_STRICT_CLAIMS, "1")
    claim("2 ranks are faster", True)
    with pytest.raises(AssertionError, match="the claim does not hold: 2 ranks are faster"):
        claim("2 ranks are faster", False)


def test_a_claim_about_other_parameters_is_told_and_is_never_an_error(capsys, monkeypatch):
    monkeypatch.setenv(ENV_STRICT_CLAIMS, "1")
    claim("the square sends least", False, where=False)
    assert capsys.readouterr().out == "Said of other parameters than these: the square sends least\n"
    claim("the square sends least", True, where=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(AssertionError, match="does not hold"):
        claim("the square sends least", False, where=True)


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (None, "no prediction"),
        (0.5, "0.5"),
        (12.0, "12"),
        (16_016_000.0, "16,016,000"),
        (1234.56, "1,235"),
        (0.0625, "0.0625"),
    ],
)
def test_a_prediction_is_shown_as_it_was_written(prediction, text):
    assert prediction_text(prediction) == text
