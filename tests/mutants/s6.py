"""Mutants of section s6 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
