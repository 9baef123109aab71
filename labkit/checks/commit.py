"""The name of ``labkit.checks.claims`` in version 0.1, which learners' own cells may still use."""

from labkit.checks.claims import claim, commit

__all__ = ["claim", "commit"]
