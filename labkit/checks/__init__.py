"""Checks of the labs' exercises. Each takes the learner's function, runs it, and says what is right
or what is wrong.

A check judges behaviour, not text: values, bytes sent, gradients, on real ranks where that is the
point.
"""
