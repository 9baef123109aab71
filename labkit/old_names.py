"""Import modules by the names that they had in earlier versions, which learners' copies still use.

A name is entered in ``OLD_NAMES`` when a module moves, and stays there. Like hidden_modules.py this
imports only what Python itself has loaded before, so that no file of a learner's can hide it.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Packages of version 0.1 and 0.2, and where they are now.
OLD_NAMES = {
    "labkit.checks.commit": "labkit_course.checks.claims",
    "labkit.checks": "labkit_course.checks",
    "labkit.course": "labkit_course",
    "labkit.widgets": "labkit_course.widgets",
    "labkit_cluster.checks": "labkit_course.checks.hosts",
    "labkit_simulate.checks": "labkit_course.checks.simulation",
    "labkit_simulate.widgets": "labkit_course.plan_explorer",
}


def find_new_name(name: str) -> str | None:
    """Return the present name of a module, by one of its earlier ones; None for all other names."""
    for old, new in OLD_NAMES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


# Not a subclass of importlib's finder and loader, because importlib.abc imports random and more.
class OldNameFinder:
    """Find a module under its new name where it is imported by its old one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose module is that of the new name; None for all other names."""
        if find_new_name(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stand-in, which ``exec_module`` replaces."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the stand-in's place, as importlib allows."""
        if new := find_new_name(module.__name__):
            sys.modules[module.__name__] = importlib.import_module(new)


# Before the others, which would find the files of a renamed package a second time.
sys.meta_path.insert(0, OldNameFinder())
