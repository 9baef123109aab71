"""Docstrings name what is there: a renamed parameter or attribute takes its entry along."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for folder in ("labkit", "labkit_simulate", "labkit_cluster", "launch")
    for file in (ROOT / folder).rglob("*.py")
]


def entries(docstring: str, section: str) -> set[str]:
    """The names that a section such as Args explains, each at an indent of four."""
    found = re.search(rf"^{section}:\n((?: {{4}}.*\n?|\n(?= {{4}}))+)", docstring, re.MULTILINE)
    return set(re.findall(r"^ {4}\**(\w+): ", found[1], re.MULTILINE)) if found else set()


def test_every_explained_parameter_and_attribute_exists():
    unknown = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                explained = entries(ast.get_docstring(node) or "", "Args")
                known = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            elif isinstance(node, ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                explained = entries(docstring, "Args") | entries(docstring, "Attributes")
                known = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
                known |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                known |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                known |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
            else:
                continue
            unknown += [f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {name}" for name in explained - known]
    assert not unknown


@pytest.mark.parametrize("section", ["Args", "Attributes"])
def test_entries_are_found(section):
    text = f"Do it.\n\n{section}:\n    size: of it,\n        in bytes: 8.\n    **more: rest.\n"
    assert entries(text, section) == {"size", "more"}
