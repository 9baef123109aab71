"""What `make` installs, and which parts of the tests it runs: a stand-in for Python writes down how it is called."""

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
    *"${FAILING:-nothing fails}"*) exit 1 ;;
esac
"""


@pytest.fixture
def installed(repository, tmp_path):
    """Lets make install in a folder of its own, and gives the calls of pip's install, in order."""

    def call(*arguments, path="/usr/bin:/bin"):
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(repository / name, tmp_path)
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(STAND_IN)
        python.chmod(0o755)
        command = ["make", f"PYTHON={sys.executable}", *arguments, ".venv/.installed"]
        done = subprocess.run(command, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "calls").read_text().splitlines()
        return [line for line in lines if "pip install" in line]

    return call


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an ordinary index has no CUDA build")


@linux
def test_without_a_driver_torch_comes_from_its_cpu_index_first(installed, tmp_path):
    cpu, everything = installed()
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in cpu and "--timeout 5 --retries 0" in cpu
    assert everything.endswith("-e .[dev]")
    assert "torch==2.13.0\n" in (tmp_path / ".venv" / "constraints.txt").read_text()


def test_with_a_driver_the_ordinary_index_is_asked_alone(installed, tmp_path):
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    calls = installed(path=f"{tool.parent}:{os.environ['PATH']}")
    assert len(calls) == 1 and "--index-url" not in calls[0]


def test_another_torch_changes_no_other_pin(installed, tmp_path, repository):
    installed("TORCH=2.11.0")
    ours, theirs = (
        set((folder / "constraints.txt").read_text().splitlines()) for folder in (repository, tmp_path / ".venv")
    )
    assert theirs - ours == {"torch==2.11.0", "setuptools>=77,<82"}, "which torch limits above, and labkit below"
    assert {line.split("==")[0] for line in ours - theirs} == {"torch", "setuptools"}


def compat(repository, *words):
    plain = {"PATH": os.environ["PATH"]}  # without what a `make compat TORCH=…` that runs this test hands on
    command = ["make", "--dry-run", "compat", *words]
    return subprocess.run(command, cwd=repository, env=plain, capture_output=True, text=True, timeout=60).stdout


def test_compat_wants_to_know_which_python_or_torch(repository):
    plain = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["make", "compat"], cwd=repository, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "make compat TORCH=2.11.0" in done.stderr


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["TORCH=2.11.0"], ".venv-torch-2.11.0"),
        (["PYTHON=/opt/bin/python3.13"], ".venv-python3.13-torch-2.13.0"),
        (["PYTHON=python3.13", "TORCH=2.11.0"], ".venv-python3.13-torch-2.11.0"),
    ],
)
def test_each_python_and_torch_has_an_environment_of_its_own(repository, words, folder):
    said = compat(repository, *words)
    assert f"{folder}/bin/python -m pytest" in said
    pinned = re.search(r"sed '(.*)' constraints.txt", said)[1]
    assert ("setuptools" in pinned) == any("TORCH" in word for word in words), "another Python keeps every pin"


def test_reset_wants_to_know_which_lab(repository):
    plain = {"PATH": os.environ["PATH"]}
    command = ["make", "-o", ".venv/.installed", "reset"]
    answer = subprocess.run(command, cwd=repository, env=plain, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.startswith("Say which lab: make reset LAB=02_fsdp_wrapping")


@pytest.mark.parametrize("target", ["test", "compat-here"])
@pytest.mark.parametrize(
    ("failing", "named"),
    [("nothing", ""), ("-m alone", "alone"), ("calm", "side by side, calm")],
)
def test_every_part_runs_and_the_failed_ones_are_named_last(repository, tmp_path, target, failing, named):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "Makefile").symlink_to(repository / "Makefile")
    (python.parent / "id").symlink_to(shutil.which("id"))
    settings = {"PATH": str(python.parent), "FAILING": failing}  # without apt-get
    command = [shutil.which("make"), f"VENV={tmp_path}", "-o", f"{tmp_path}/.installed", target]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=60)
    parts = [line for line in (tmp_path / "calls").read_text().splitlines() if "pytest" in line]
    assert len(parts) == 4
    assert (done.returncode == 0) == (not named)
    assert (f"failed: {named}" in done.stderr) if named else "failed" not in done.stderr


def test_a_quick_run_leaves_out_what_starts_a_process_and_stops_what_hangs(repository, tmp_path):
    lines = ["import subprocess, threading, time", "def test_one(): subprocess.run(['true'])"]
    lines += ["def test_two(): threading.Thread(target=test_one).start(); time.sleep(9)", "def test_three(): pass"]
    lines += [
        "def test_four(): time.sleep(9)",
        "def test_five():",
        "    try: test_one()",
        "    except BaseException: 1 / 0",
    ]
    (tmp_path / "test_quick.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-p", "tests.fixture_quick", "--timeout", "2", str(tmp_path)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert "1 failed, 1 passed, 3 skipped" in done.stdout


@pytest.mark.parametrize(("mark", "variable"), [("calm", "CALM"), ("alone", "ALONE")])
def test_each_phase_is_given_all_files_that_hold_its_tests(repository, mark, variable):
    (line,) = re.findall(rf"^{variable} := (.*)", (repository / "Makefile").read_text(), flags=re.MULTILINE)
    given = {path for word in line.split() for path in repository.glob(word)}
    files = (repository / "tests").rglob("test_*.py")
    marked = {path for path in files if f"pytest.mark.{mark}" in path.read_text()}
    assert marked and not [path for path in marked if not {path, *path.parents} & given]
