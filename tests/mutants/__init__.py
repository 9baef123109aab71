"""Changes that break what a row of the specification asks for, each with the test that must notice.

One file a section, each with its ``MUTANTS``. ``tests/test_mutants.py`` puts every one into a copy of the checkout and
runs its test there. A mutant breaks the logic (a sum for a mean, the wrong neighbour, the last step only) wherever it
can; "off" marks the few that take a feature away or ignore an option.

    export LABKIT_TEST=all                                      # make test TODAY=1 takes every seventh one
    python -m pytest -n 2 tests/test_mutants.py                 # twenty minutes
    python -m pytest tests/test_mutants.py -k "S1 and halo"     # whose names hold these words
    TIER=daily python -m pytest tests/test_mutants.py           # what `make test` alone would notice
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change, and who sees it."""

    row: str
    """Of the specification: its section and what it is about, such as "S1 LayerNorm"."""
    change: str
    """What is wrong afterwards."""
    file: str
    old: str
    """Text that is in the file once."""
    new: str
    test: str
    """What must fail, as pytest takes it: a file, ``::`` and a test, or several, with a blank between."""
    off: bool = False
    """Whether the change takes a feature away, rather than breaking its logic."""


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the change. Raises ValueError unless the old text is there once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times, not once: mend the table")
    return text.replace(mutant.old, mutant.new)
