"""What other machines make of the repository: the workflow of hosted CI, Binder, and an image for containers."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from labkit import torch_private

WORKFLOW = ".github/workflows/tests.yml"


@pytest.fixture(scope="module")
def jobs(repository):
    return yaml.safe_load((repository / WORKFLOW).read_text())["jobs"]


@pytest.fixture(scope="module")
def pythons(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))


def breaks_schema(path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "ok -- validation done" in done.stdout or "Schema validation errors" in done.stdout, done.stderr
    return done.stdout if done.returncode else ""


def test_the_workflow_is_one_by_its_schema(repository, tmp_path):
    pytest.importorskip("check_jsonschema", reason="needs `make`")
    assert breaks_schema(repository / WORKFLOW) == ""
    spoilt = tmp_path / "tests.yml"
    spoilt.write_text((repository / WORKFLOW).read_text().replace("runs-on:", "run-on:"))
    assert "runs-on" in breaks_schema(spoilt)


def test_the_workflow_tries_each_python_and_torch_that_pip_accepts(jobs, pythons):
    matrix = jobs["compat"]["strategy"]["matrix"]
    assert matrix["python"] == jobs["wheel"]["strategy"]["matrix"]["python"] == pythons
    assert {*matrix["torch"], *(each["torch"] for each in matrix["include"])} == set(torch_private.SEEN)
    assert matrix["torch"] == [torch_private.SEEN[-1]]


def test_what_the_workflow_calls_is_there(jobs, repository):
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    words = [shlex.split(line.split("#")[0]) for line in lines if "\n" not in line]
    targets = [line[1] for line in words if line[0] == "make"]
    scripts = [word for line in words for word in line if word.startswith(".ci/")]
    makefile = (repository / "Makefile").read_text()
    assert {"compat", "dist", "colab", "nightly"} == set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    assert set(scripts) == {".ci/run", ".ci/stranger"} and all((repository / script).exists() for script in scripts)


def test_binder_installs_what_conda_does(repository, pythons):
    *_, conda = yaml.safe_load((repository / "environment.yml").read_text())["dependencies"]
    lines = (repository / ".binder" / "requirements.txt").read_text().replace("../", "").splitlines()
    assert [line for line in lines if not line.startswith("#")] == conda["pip"]
    assert (repository / ".binder" / "runtime.txt").read_text().strip().removeprefix("python-") in pythons


def test_the_development_container_is_built_from_the_image_for_everyone(repository):
    path = repository / ".devcontainer" / "devcontainer.json"
    container = json.loads(path.read_text())
    dockerfile = path.parent / container["build"]["dockerfile"]
    assert dockerfile.resolve() == repository / "Dockerfile"
    users = re.findall(r"^USER (\w+)$", dockerfile.read_text(), re.M)
    assert users == [container["remoteUser"]] and users != ["root"], "a hub wants no root"
