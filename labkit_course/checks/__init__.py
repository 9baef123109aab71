"""Checks of the labs' exercises: each runs the learner's function and returns a verdict.

A check judges behaviour, not source text: values, bytes sent and gradients, often on real ranks.
"""
