"""tests/mutants.py: its table fits the code as it stands; that each mutant is caught takes a quarter of an hour."""

import re
from collections import Counter

import pytest

from tests import mutants


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: f"{mutant.row}: {mutant.change}")
def test_a_mutant_still_changes_one_place_and_its_test_is_there(mutant):
    text = (mutants.ROOT / mutant.file).read_text()
    changed = mutants.mutated(text, mutant)
    assert changed != text
    compile(changed, mutant.file, "exec")
    for test in mutant.test.split():
        file, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (mutants.ROOT / file).read_text()


def test_every_row_of_the_specification_has_a_mutant():
    rows = {mutant.row for mutant in mutants.MUTANTS}
    assert Counter(row.split()[0] for row in rows) == {"S1": 7, "S2": 7, "S3": 15, "S4": 6, "S5": 6, "S6": 10}


def test_a_place_that_has_moved_is_named():
    mutant = mutants.MUTANTS[0]
    with pytest.raises(ValueError, match=re.escape(f"{mutant.file} holds {mutant.old!r} 0 times, not once")):
        mutants.mutated("", mutant)


def test_the_reason_is_the_error_that_a_test_ended_with():
    said = "F\n/tmp/x.py:3: AssertionError: assert 1 == 2\n=== short test summary\n"
    assert mutants.reason(said) == "AssertionError: assert 1 == 2"
    assert mutants.reason("1 failed in 2 s") == "1 failed in 2 s"
