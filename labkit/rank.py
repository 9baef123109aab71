"""The short name under which rank programs and cells import the session of labkit/session:
``with rank.session() as here``.
"""

from labkit.session.payload import is_replaced, load_config, replaceable, report
from labkit.session.session import Session, StepLoop, exit_with_reason, run_main, session

__all__ = ["Session", "StepLoop", "exit_with_reason", "is_replaced", "load_config"]
__all__ += ["replaceable", "report", "run_main", "session"]

# The name in version 0.1, which learners' own cells may still use.
give = report
