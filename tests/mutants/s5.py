"""Mutants of section s5 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
