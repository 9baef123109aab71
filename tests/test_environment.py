"""pyproject.toml, constraints.txt and environment.yml name the same packages at the same versions."""

import re
import tomllib
from importlib import metadata

import pytest
import yaml


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins(repository):
    lines = [line.split("#")[0].strip() for line in (repository / "constraints.txt").read_text().splitlines()]
    for line in filter(None, lines):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"not one exact public version: {line}"
    pairs = [line.split("==") for line in filter(None, lines)]
    names = [normal(name) for name, _ in pairs]
    assert len(names) == len(set(names)), "a package is pinned twice"
    return dict(zip(names, [version for _, version in pairs], strict=True))


def normal(name):
    """A package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement):
    return normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0])


def declared(project):
    """Every package that pyproject.toml names, in core and extras; other launchers are for a benchmark alone, and
    nbgrader would change every learner's JupyterLab.
    """
    extras = [group for name, group in project["optional-dependencies"].items() if name not in ("bench", "grade")]
    groups = [project["dependencies"], *extras]
    return {requirement_name(entry) for group in groups for entry in group} - {"labkit"}


def environment(repository):
    return yaml.safe_load((repository / "environment.yml").read_text())


def test_environment_yml_lists_what_pyproject_lists_at_the_pinned_versions(repository, project, pins):
    dependencies = environment(repository)["dependencies"]
    (packages,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    assert packages[-1] == "--editable ."
    assert sorted(packages[:-1]) == sorted(f"{name}=={pins[name]}" for name in declared(project))


def test_environment_yml_has_python_in_the_supported_range(repository, project):
    plain = [entry for entry in environment(repository)["dependencies"] if isinstance(entry, str)]
    assert plain == ["python=3.11", "pip"]
    assert project["requires-python"] == ">=3.11"


def test_pinned_torch_is_in_the_supported_range(project, pins):
    assert "torch>=2.11" in project["dependencies"]
    assert pins["torch"] == "2.13.0"


def test_every_requirement_of_every_pinned_package_is_pinned(project, pins):
    """Follows what is installed here, from pyproject.toml's names down."""
    from packaging.requirements import Requirement

    waiting, seen = sorted(declared(project) | {"nbgrader"}), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name in pins, f"{name} is needed, and constraints.txt does not pin it"
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        # A CUDA build of torch brings packages that the pinned CPU build has not.
        wanted = [Requirement(text) for text in needs if not text.startswith(("nvidia", "cuda", "triton"))]
        waiting += [normal(need.name) for need in wanted if not need.marker or need.marker.evaluate({"extra": ""})]
    assert len(seen) > len(declared(project))


def test_installed_versions_are_the_pinned_ones(pins):
    """Fails where .venv was not made from constraints.txt: what passes there says nothing about the pins."""
    different = []
    for distribution in metadata.distributions():
        name = normal(distribution.metadata["Name"])
        version = distribution.version.split("+")[0]
        if name in pins and pins[name] != version:
            different.append(f"{name} {version}, pinned {pins[name]}")
    if "torch" in {entry.split()[0] for entry in different}:
        pytest.skip(f"another torch than constraints.txt pins is under test: {', '.join(different)}")
    assert not different, f"run make again, or mend constraints.txt: {', '.join(different)}"
