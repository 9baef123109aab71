"""constraints.txt pins what pyproject.toml needs, and environment.yml gives learners just that."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata

import pytest
import yaml

from labkit import torch_private
from labkit.requirements import MIN_TORCH_VERSION, UNTESTED_TORCH_VERSION, parse_version

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


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


@pytest.fixture(scope="module")
def conda(repository):
    """environment.yml: what conda installs, and the lines that it hands to pip."""
    *plain, last = yaml.safe_load((repository / "environment.yml").read_text())["dependencies"]
    return plain, last["pip"]


def test_environment_yml_has_python_a_compiler_and_the_learners_packages(conda, project):
    plain, lines = conda
    assert plain == ["python=3.11", "pip", "cxx-compiler"]
    assert project["requires-python"].startswith(">=3.11,")
    assert lines == [f"--extra-index-url {CPU_INDEX}", "--constraint constraints.txt", "--editable .[notebook]"]


def resolve(*options, folder, timeout_s=60):
    """What pip would install into an empty environment, versions by name, and its error where that cannot be."""
    command = [*(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"), *options]
    command += ["--retries", "1", "--timeout", "10", "--report", "report.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        return {}, done.stderr
    packages = [each["metadata"] for each in json.loads((folder / "report.json").read_text())["install"]]
    return {normal(each["name"]): each["version"] for each in packages}, ""


@pytest.mark.long  # pip reads 125 packages, most of which it has to download for that
@pytest.mark.timeout(400)
def test_pip_finds_every_package_of_environment_yml_at_its_pinned_version(conda, pins, repository, tmp_path):
    if not resolve("--no-deps", "cloudpickle", folder=tmp_path)[0]:
        pytest.skip("no package index can be reached: set PIP_INDEX_URL to one")
    # As conda and mamba do it: a file of requirements beside environment.yml.
    for name in ("pyproject.toml", "DESCRIPTION.md", "LICENSE", "constraints.txt"):
        shutil.copy(repository / name, tmp_path)
    (tmp_path / "requirements.txt").write_text("\n".join(conda[1]))
    found, problem = resolve("-r", "requirements.txt", folder=tmp_path, timeout_s=360)
    assert found, problem
    versions = {name: version.partition("+")[0] for name, version in found.items() if name != "labkit"}
    # They belong to the CUDA build of torch.
    unpinned = [name for name in versions.keys() - pins.keys() if not name.startswith(("nvidia", "cuda", "triton"))]
    assert unpinned == [] and {"torch", "jupyterlab", "nbclient", "pyzmq"} <= versions.keys()
    assert versions.items() <= pins.items() | {(name, versions[name]) for name in versions.keys() - pins.keys()}
    cpu, _ = resolve("--no-deps", "--index-url", CPU_INDEX, f"torch=={pins['torch']}", folder=tmp_path)
    if sys.platform != "linux" or not cpu or "+cpu" not in cpu["torch"]:
        pytest.skip(f"all pins are found; {CPU_INDEX} cannot be reached, so torch's build is not compared")
    assert found["torch"] == f"{pins['torch']}+cpu" and versions.keys() <= pins.keys()


def test_pinned_torch_is_in_the_supported_range(project, pins):
    least, most = (".".join(map(str, each)) for each in (MIN_TORCH_VERSION, UNTESTED_TORCH_VERSION))
    assert f"torch>={least},<{most}" in project["dependencies"]
    assert pins["torch"] == torch_private.SEEN[-1]
    assert MIN_TORCH_VERSION <= parse_version(pins["torch"]) < UNTESTED_TORCH_VERSION


def test_the_classifiers_name_each_python_that_pip_accepts(project):
    from packaging.specifiers import SpecifierSet

    accepted = SpecifierSet(project["requires-python"])
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"]]
    pythons = [f"3.{minor}" for minor in range(8, 30) if accepted.contains(f"3.{minor}.1")]
    assert pythons == [match[1] for match in named if match]


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
    # Some packages bring others of their own, such as setuptools, and put them on sys.path when they are imported.
    for distribution in metadata.distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        name = normal(distribution.metadata["Name"])
        version = distribution.version.split("+")[0]
        if name in pins and pins[name] != version:
            different.append(f"{name} {version}, pinned {pins[name]}")
    if "torch" in {entry.split()[0] for entry in different}:
        pytest.skip(f"another torch than constraints.txt pins is under test: {', '.join(different)}")
    assert not different, f"run make again, or mend constraints.txt: {', '.join(different)}"
