"""A class's machines: a preflight that can fail, and the script that installs without a network."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import labkit
from labkit import doctor
from labkit_course import preflight

READY = (
    r"mkdir -p .venv/bin; printf '#!/bin/sh\nshift 2; echo PASS $$@\n' > .venv/bin/python; chmod +x .venv/bin/python"
)
"""What stands for an installation: a Python whose preflight passes."""


def finding(status, labs):
    return doctor.Finding(status, "C++ compiler", "none", "apt-get install g++", labs)


@pytest.mark.parametrize(
    ("labs", "found", "sums", "status", "said"),
    [
        ([], finding("OK", ""), True, 0, "PASS: "),
        ([], finding("FAIL", "labs 4b and 4c"), True, 1, "FAIL: C++ compiler: none; fix: apt-get install g++"),
        (["0", "02"], finding("FAIL", "labs 4b and 4c"), True, 0, "PASS: labs 0, 2: "),
        (["04b"], finding("FAIL", "labs 4b and 4c"), True, 1, "FAIL: "),
        (["9"], finding("OK", ""), True, 2, "FAIL: no lab is called '9'"),
        (["2"], finding("FAIL", "all labs"), True, 1, "FAIL: "),
        (["2", "4b"], finding("FAIL", "labs 4b and 4c"), True, 1, "FAIL: "),
        ([], finding("NOTE", "labs 4b"), True, 0, "PASS: "),
        ([], finding("OK", ""), False, 1, "FAIL: four ranks: tensors differ"),
        ([], finding("OK", ""), labkit.LabError("no port is free\nmore"), 1, "FAIL: four ranks: no port is free"),
    ],
)
def test_the_preflight_says_in_one_line_whether_the_labs_can_run(monkeypatch, capsys, labs, found, sums, status, said):
    class Outcome:
        ok, verdict_text = sums, "tensors differ"

    def check(program, nproc, **options):
        assert (program, nproc) == ("all_reduce", 4)
        if isinstance(sums, Exception):
            raise sums
        return Outcome

    monkeypatch.setattr(doctor, "run_checks", lambda: doctor.Diagnosis([found]))
    monkeypatch.setattr(labkit, "check", check)
    assert preflight.main(labs) == status
    out = capsys.readouterr().out
    assert out.startswith(said) and out.count("\n") == 1


@pytest.mark.parametrize(
    ("recipe", "made_for", "status", "said"),
    [
        (READY, "", 0, "PASS 0 2"),
        (READY, "Python 3 1 Nowhere", 1, "FAIL: the wheels are for Python 3 1 Nowhere, and .* is Python 3 "),
        ("echo no wheel; exit 1", "", 1, "FAIL: not installed, see .*/install.log"),
    ],
)
def test_the_workshops_script_ends_with_pass_or_fail(repository, tmp_path, recipe, made_for, status, said):
    folder = tmp_path / "on a stick"
    (folder / "wheels").mkdir(parents=True)
    shutil.copy(repository / "docs" / "install_workshop.sh", folder / "install.sh")
    asks = re.search(r"^MADE_FOR := (.+)$", (repository / "Makefile").read_text(), flags=re.MULTILINE)[1]
    (folder / "wheels" / "made-for.py").write_text(asks + "\n")
    here = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout
    (folder / "wheels" / "made-for").write_text(made_for or here)
    (folder / "Makefile").write_text(f".venv/.installed:\n\t@test $$PIP_NO_INDEX = 1 && {{ {recipe}; }}\n")
    command = [folder / "install.sh", "0", "2"]
    plain = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.match(said, done.stdout.splitlines()[-1]), done.stdout
