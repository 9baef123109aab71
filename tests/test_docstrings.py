"""Docstrings and documentation name what is there, after renames too."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for folder in ("labkit", "labkit_course", "labkit_simulate", "labkit_cluster", "launch")
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


TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "notebooks" / "src").glob("*.py"),
]


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_every_dotted_name_of_labkit_exists(file):
    text = file.read_text()
    names = set(re.findall(r"`(labkit\w*(?:\.\w+)+)(?=[`(])", text))
    if file.suffix == ".md":  # elsewhere a variable may have such a name
        names |= {f"labkit.{name}" for name in re.findall(r"(?<![.\w])((?:plots|widgets|rank)\.\w+)\(", text)}
    unknown = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            unknown.append(name)
    assert not unknown
