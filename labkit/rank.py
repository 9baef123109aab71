"""What a rank program uses of labkit: ``with rank.session() as here``.

The session itself lives in labkit/session; this module is the short name that rank programs and cells import.
"""

from labkit.session.given import give, is_given, replaceable
from labkit.session.session import Here, Measure, refuse, session, start

__all__ = ["Here", "Measure", "give", "is_given", "refuse", "replaceable", "session", "start"]
