"""Inside a rank: the session, and what it measures (time, memory, traffic, a time line)."""

from labkit.rank.given import give, is_given, replaceable
from labkit.rank.here import Here, Measure, refuse, session, start

__all__ = ["Here", "Measure", "give", "is_given", "refuse", "replaceable", "session", "start"]
