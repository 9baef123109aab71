"""Every LABKIT_ variable has one constant, in labkit/environment.py, and one row in docs/environment.md."""

import ast
import re

from labkit import environment

NAME = re.compile(r"(?<![A-Z_])LABKIT_[A-Z_]+[A-Z]")
CODE = ("labkit", "labkit_course", "labkit_simulate", "labkit_cluster", "launch", "benchmarks", "notebooks/tools")
TEXTS = ("Makefile", "*.md", "docs/*.md", "launch/cluster/*", "notebooks/src/*.py", "tests/**/*.py")
KNOWN = {value for name, value in vars(environment).items() if name.startswith("ENV_")}


def strings(repository):
    """All string literals of the code, with the place of each."""
    for path in (path for folder in CODE for path in (repository / folder).rglob("*.py")):
        if path != repository / "labkit" / "environment.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(repository)}:{node.lineno}", node.value


def test_the_code_takes_the_names_of_variables_from_one_module(repository):
    written_out = [(place, text) for place, text in strings(repository) if NAME.fullmatch(text)]
    assert not written_out, "import the ENV_ constant of labkit.environment instead"


def test_every_variable_that_is_mentioned_exists(repository):
    mentioned = [(place, name) for place, text in strings(repository) for name in NAME.findall(text)]
    for path in (path for pattern in TEXTS for path in repository.glob(pattern) if path.is_file()):
        quoted = re.sub(r"LABKIT_FOLDER_NAME", "", path.read_text())  # a constant of that name
        mentioned += [(str(path.relative_to(repository)), name) for name in NAME.findall(quoted)]
    unknown = [(place, name) for place, name in mentioned if name not in KNOWN]
    assert not unknown, "add it to labkit/environment.py"


def test_every_variable_is_documented_once(repository):
    rows = re.findall(r"^\| `(LABKIT_\w+)`", (repository / "docs/environment.md").read_text(), re.M)
    assert sorted(rows) == sorted(KNOWN)
