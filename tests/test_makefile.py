"""What `make` installs, and from where: a stand-in for the environment's Python writes down how it is called."""

import os
import re
import shutil
import subprocess
import sys

import pytest

STAND_IN = """#!/bin/sh
echo "$@" >> calls
case "$*" in
    *"import torch"*) exit 1 ;;
    *--index-url*) exit ${CPU_INDEX_FAILS:-0} ;;
esac
"""


@pytest.fixture
def installed(repository, tmp_path):
    """Lets make install in a folder of its own, and gives the calls of pip's install, in order."""

    def call(*arguments, path="/usr/bin:/bin", **environment):
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(repository / name, tmp_path)
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(STAND_IN)
        python.chmod(0o755)
        settings = {"PATH": path, **environment}
        command = ["make", f"PYTHON={sys.executable}", *arguments, ".venv/.installed"]
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "calls").read_text().splitlines()
        return [line for line in lines if "pip install" in line], done.stdout + done.stderr

    return call


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an ordinary index has no CUDA build")


@linux
def test_without_a_driver_torch_comes_from_its_cpu_index_first(installed, tmp_path):
    (cpu, everything), _ = installed()
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in cpu and "--timeout 5 --retries 0" in cpu
    assert everything.endswith("-e .[dev]")
    assert "torch==2.13.0\n" in (tmp_path / ".venv" / "constraints.txt").read_text()


@linux
def test_an_index_that_does_not_answer_raises_no_alarm(installed):
    calls, said = installed(CPU_INDEX_FAILS="1")
    assert len(calls) == 2 and said.strip() == "Installing into .venv; the first time takes some minutes."


@linux
def test_another_index_or_none_can_be_named(installed):
    assert "--index-url https://mirror/cpu torch" in installed("TORCH_INDEX=https://mirror/cpu")[0][0]


@linux
def test_no_index_named_is_none_asked(installed):
    calls, _ = installed("TORCH_INDEX=")
    assert len(calls) == 1 and "--index-url" not in calls[0]


def test_with_a_driver_the_ordinary_index_is_asked_alone(installed, tmp_path):
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    calls, _ = installed(path=f"{tool.parent}:{os.environ['PATH']}")
    assert len(calls) == 1 and "--index-url" not in calls[0]


def test_another_torch_changes_no_other_pin(installed, tmp_path, repository):
    installed("TORCH=2.11.0")
    ours, theirs = (set((folder / "constraints.txt").read_text().splitlines()) for folder in (repository, tmp_path / ".venv"))
    assert theirs - ours == {"torch==2.11.0", "setuptools>=77,<82"}, "which torch limits above, and labkit below"
    assert {line.split("==")[0] for line in ours - theirs} == {"torch", "setuptools"}


def test_compat_wants_to_know_which_torch(repository):
    plain = {"PATH": os.environ["PATH"]}  # without what a `make compat TORCH=…` that runs this test hands on
    done = subprocess.run(["make", "compat"], cwd=repository, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "make compat TORCH=2.11.0" in done.stderr


def test_reset_wants_to_know_which_lab(repository):
    plain = {"PATH": os.environ["PATH"]}
    command = ["make", "-o", ".venv/.installed", "reset"]
    answer = subprocess.run(command, cwd=repository, env=plain, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.startswith("Say which lab: make reset LAB=02_fsdp_wrapping")


@pytest.mark.parametrize(("given", "opens"), [([], "00_ranks"), (["LAB=02_fsdp_wrapping"], "02_fsdp_wrapping")])
def test_lab_opens_the_first_or_the_one_that_is_named(repository, given, opens):
    plain = {"PATH": os.environ["PATH"]}
    command = ["make", "-n", "-o", ".venv/.installed", "lab", *given]
    answer = subprocess.run(command, cwd=repository, env=plain, capture_output=True, text=True, timeout=60)
    assert answer.stdout.strip() == f".venv/bin/python -m labkit lab {opens}"


@pytest.mark.parametrize(("mark", "variable"), [("calm", "CALM"), ("alone", "ALONE")])
def test_each_phase_is_given_all_files_that_hold_its_tests(repository, mark, variable):
    (line,) = re.findall(rf"^{variable} := (.*)", (repository / "Makefile").read_text(), flags=re.MULTILINE)
    given = {path for word in line.split() for path in repository.glob(word)}
    files = (repository / "tests").rglob("test_*.py")
    marked = {path for path in files if f"pytest.mark.{mark}" in path.read_text()}
    assert marked and not [path for path in marked if not {path, *path.parents} & given]
