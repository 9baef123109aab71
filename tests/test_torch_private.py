"""Every private name of torch that labkit uses is there, has a reason, and stands in one module."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit import doctor, torch_private
from labkit.torch_private import PRIVATE_NAMES, PrivateName

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    path
    for folder in ("labkit", "labkit_course", "labkit_simulate", "labkit_cluster", "launch")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "torch_private.py"
]
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PROGRAMS}
OTHERS = {"_exit", "_shutdown", "_run_exitfuncs", "_clear", "_registry", "_exitfunc"}
OTHERS |= {"_exit_function", "_getframe", "_current_frames", "_render_traceback_", "_repr_mimebundle_"}
"""Private names of Python and of IPython."""
BROKEN = PrivateName("torch.distributed:_no_such_name", "a test", "the test of labs")


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=[each.path for each in PRIVATE_NAMES])
def test_this_torch_has(entry):
    if torch.__version__.partition("+")[0] in set(torch_private.SEEN) - set(entry.seen):
        pytest.skip(f"known to be absent: it is in {', '.join(entry.seen)}")
    assert entry.is_there(), f"torch {torch.__version__} lacks {entry.path}; lost: {entry.lost}"
    assert entry.why and entry.lost


@pytest.mark.parametrize(
    "path",
    [
        "torch.utils._pytree:tree_leafs",
        "torch.utils._pytrees:tree_leaves",
        "torch.distributed._tools.mem_tracker:MemTracker._mod_track",
        "torch:ops.aten._scaled_dot_product_no_attention.default",
        "torch._dynamo.trace_rulez",
    ],
)
def test_a_misspelt_name_is_missed(path, monkeypatch):
    entry = PrivateName(path, "a test", "nothing")
    assert not entry.is_there()
    monkeypatch.setattr(torch_private, "PRIVATE_NAMES", (PRIVATE_NAMES[0], entry))
    assert torch_private.missing_names() == [entry]


def test_an_absent_name_says_what_is_lost_and_what_to_install(monkeypatch):
    monkeypatch.setattr(torch_private, "PRIVATE_NAMES", (BROKEN,))
    torch_private._find_entry.cache_clear()
    with pytest.raises(RuntimeError, match=r"torch 2\..*_no_such_name.*2\.13\.0.*the test of labs"):
        torch_private.get("no_such_name")
    with pytest.raises(RuntimeError, match="no_such_name"):
        torch_private.replace("no_such_name", None)
    assert not hasattr(torch.distributed, "_no_such_name")
    torch_private._find_entry.cache_clear()


@pytest.mark.parametrize("name", ["anything_else", "init_device_mesh"])
def test_a_name_that_is_not_one_entry_is_refused(name):
    with pytest.raises(AttributeError, match=f"'{name}' must name one entry"):
        torch_private.get(name)


def test_a_replaced_function_is_called_and_its_original_given(monkeypatch):
    original = torch.utils.swap_tensors
    monkeypatch.setattr(torch.utils, "swap_tensors", original)  # put back at the end
    torch_private.wrap("swap_tensors", lambda function: lambda *args: ("instead of", function))
    assert torch.utils.swap_tensors(1, 2) == ("instead of", original)


def test_the_doctor_counts_all_or_names_what_is_missing_and_lost(monkeypatch):
    finding = doctor.check_private_names()
    assert finding.status == "OK" and str(len(PRIVATE_NAMES)) in finding.detail
    monkeypatch.setattr(torch_private, "PRIVATE_NAMES", (*PRIVATE_NAMES[:2], BROKEN))
    finding = doctor.check_private_names()
    assert finding.status == "FAIL"
    assert BROKEN.path in finding.detail and BROKEN.lost in finding.labs
    assert "torch==2.13.0" in finding.fix


def test_no_other_module_names_a_private_part_of_torch():
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
    named = {path: hit[0] for path in TREES if (hit := private.search((ROOT / path).read_text()))}
    assert not named, "take it from labkit.torch_private"


def test_attributes_of_others_that_are_private_stand_in_the_table():
    own = set(OTHERS)
    used = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
                else:
                    used.setdefault(node.attr, path)
    known = {re.split("[.:]", each.path)[-1] for each in PRIVATE_NAMES}
    strangers = {name: path for name, path in used.items() if name not in own | known}
    assert not strangers, "a private attribute of torch's belongs into labkit.torch_private"


def test_every_name_that_is_taken_from_the_table_is_in_it_once():
    taken = {
        alias.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "labkit.torch_private"
        for alias in node.names
    }
    taken |= {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_private"
    }
    assert len(taken) > 30
    for name in taken - vars(torch_private).keys() - {"TORCH_VERSION"}:
        torch_private._find_entry(name)


def test_the_table_is_read_without_torch():
    code = "import sys, labkit.torch_private as t\nprint(len(t.PRIVATE_NAMES), 'torch' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert seen.stdout.split() == [str(len(PRIVATE_NAMES)), "False"], seen.stderr
