"""Mutants of section s4 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
