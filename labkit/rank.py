"""What a rank program uses of labkit: ``with rank.session() as here``.

The session itself lives in labkit/session; this module is the short name that rank programs and
cells import.
"""

from labkit.session.payload import is_replaced, load_config, replaceable, report
from labkit.session.session import Session, StepLoop, exit_with_reason, run_main, session

__all__ = [
    "Session",
    "StepLoop",
    "exit_with_reason",
    "is_replaced",
    "load_config",
    "replaceable",
    "report",
    "run_main",
    "session",
]

# The name in version 0.1, which learners' own cells may still use.
give = report
