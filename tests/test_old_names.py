"""labkit.old_names: what copies of earlier versions import is found, as the same module as under its new name."""

import importlib
import sys

import pytest

from labkit import old_names

# A line of each earlier notebook's head, or of a cell that a learner may have written.
LINES = {
    "from labkit import widgets as found": "labkit_course.widgets",
    "from labkit.checks import spatial as found": "labkit_course.checks.spatial",
    "import labkit.checks.judge as found": "labkit_course.checks.judge",
    "from labkit.checks.ranks import fsdp as found": "labkit_course.checks.ranks.fsdp",
    "import labkit.checks.commit as found": "labkit_course.checks.claims",
    "from labkit.course import verdict_store as found": "labkit_course.verdict_store",
    "from labkit_simulate import checks as found": "labkit_course.checks.simulation",
    "from labkit_cluster import checks as found": "labkit_course.checks.hosts",
    "import labkit_simulate.widgets as found": "labkit_course.plan_explorer",
}


@pytest.mark.parametrize(("line", "new_name"), LINES.items())
def test_an_old_name_imports_the_module_of_the_new_one(line, new_name):
    names = {}
    exec(line, names)
    assert names["found"] is importlib.import_module(new_name)
    assert names["found"].__name__ == new_name


def test_a_name_that_never_was_is_no_module():
    for name in ("labkit.checks.nonsense", "labkit.checkers"):
        with pytest.raises(ModuleNotFoundError, match=name.rpartition(".")[2]):
            importlib.import_module(name)


def test_every_old_name_leads_to_a_module():
    for name in old_names.OLD_NAMES:
        importlib.import_module(name)
        assert name in sys.modules
