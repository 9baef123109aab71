"""Mutants of section s7 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
