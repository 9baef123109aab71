"""What to expect, as pure formulas, one file a lab: bytes moved, bytes held, time. No torch, no
ranks.
"""
