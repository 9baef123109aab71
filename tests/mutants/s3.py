"""Mutants of section s3 of the specification."""

from mutants import Mutant

MUTANTS: list[Mutant] = []
