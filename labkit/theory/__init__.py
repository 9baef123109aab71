"""Formulas for bytes moved, bytes held and time, one file per lab. No torch, no ranks."""
