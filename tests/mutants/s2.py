"""Mutants of section s2 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
