"""Mutants of section s1 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
