"""Inside a rank: the session, and what it measures (time, memory, traffic, a time line)."""

from labkit.rank.here import Here, Measure, refuse, session, start

__all__ = ["Here", "Measure", "refuse", "session", "start"]
