"""The doctor's findings, on this machine and on machines that lack something."""

import json
import os
import re
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from labkit import doctor, environment, requirements
from labkit.doctor import Diagnosis, Finding


def test_every_finding_of_this_machine_is_complete():
    report = doctor.run_checks()
    assert len(report.findings) == 2 + len(doctor.TORCH_CHECKS) + len(doctor.OTHER_CHECKS)
    for finding in report.findings:
        assert finding.what and finding.detail
        assert finding.status != "FAIL" or (finding.fix and finding.labs), finding


def test_command_line_gives_text_and_json():
    text = subprocess.run([sys.executable, "-m", "labkit", "doctor"], capture_output=True, text=True, timeout=100)
    data = subprocess.run(
        [sys.executable, "-m", "labkit", "doctor", "--json"], capture_output=True, text=True, timeout=100
    )
    assert f"PyTorch: {torch.__version__}" in text.stdout, text
    assert [line[:1] for line in text.stdout.splitlines()[:2]] == ["[", "["]
    report = json.loads(data.stdout)
    assert data.returncode == text.returncode == (0 if report["ok"] else 1)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git12ab", (2, 14, 0)), ("2.12.0.dev20261120", (2, 12, 0)), ("3.1", (3, 1))],
)
def test_release_reads_any_build(version, numbers):
    assert requirements.parse_version(version) == numbers


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("2.11.0", "wrong on torch 2.11.0 (gradients are lost)"),
        ("2.12.0", "wrong on torch 2.12.0 (pytorch/pytorch#191926)"),
        ("2.13.0+cu130", "wrong on torch 2.13.0+cu130 (pytorch/pytorch#191926)"),
        ("2.14.1", "wrong on torch 2.14.1 (pytorch/pytorch#191926)"),
        ("2.12.1", "never measured"),
        ("2.14.0", "never measured"),
    ],
)
def test_broken_convolution_is_known_by_version(monkeypatch, version, says):
    monkeypatch.setattr(torch, "__version__", version)
    finding = doctor.check_sharded_convolution()
    assert finding.status == "NOTE" and says in finding.detail


@pytest.mark.parametrize(("version", "status"), [((2, 11), "NOTE"), ((2, 12), "NOTE"), ((2, 13), "OK")])
def test_what_an_older_torch_cannot_do_is_listed_with_its_issue(monkeypatch, version, status):
    monkeypatch.setattr(requirements, "torch_version", lambda: version)
    finding = doctor.check_torch_features()
    assert finding.status == status
    assert ("needs torch 2.13 (pytorch/pytorch#143748)" in finding.detail) == (status == "NOTE")


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [
        ((2, 11), "NOTE", "only from torch 2.12 on"),
        ((2, 12), "OK", "here, without sizes of buckets; experimental"),
        ((2, 13), "OK", "here; experimental, and off by default"),
    ],
)
def test_inductors_pass_is_called_what_it_is(monkeypatch, version, status, says):
    monkeypatch.setattr(requirements, "torch_version", lambda: version)
    finding = doctor.check_inductor_pass()
    assert finding.status == status and finding.detail.startswith(says)
    assert finding.concerns("4c") == (status == "NOTE")


@pytest.mark.parametrize(
    ("version", "status", "labs"),
    [
        ("2.10.2", "FAIL", doctor.EVERY_LAB),
        ("2.11.0", "OK", ""),
        ("2.13.9+cpu", "OK", ""),
        ("2.14.0", "FAIL", "any lab may stop"),
        ("3.0.0", "FAIL", "any lab may stop"),
    ],
)
def test_a_torch_outside_the_tested_range_fails_and_says_which_to_install(monkeypatch, version, status, labs):
    monkeypatch.setattr(torch, "__version__", version)
    finding = doctor.check_torch()
    assert finding.status == status and labs in finding.labs
    assert finding.fix == ("" if status == "OK" else "pip install 'torch>=2.11,<2.14'")


@pytest.mark.parametrize(
    ("version", "settings", "is_named"),
    [
        ("2.14.0", {}, True),
        ("3.1.0.dev20270101+cpu", {}, True),
        ("2.13.9", {}, False),
        ("2.14.0", {environment.ENV_RUN_FOLDER: "x"}, False),  # a rank does not repeat it
    ],
)
def test_importing_labkit_names_a_torch_that_is_too_new(tmp_path, version, settings, is_named):
    about = tmp_path / f"torch-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), str(Path(requirements.__file__).parents[1])])
    command = [sys.executable, "-c", "import labkit"]
    settings = os.environ | {"PYTHONPATH": path} | settings
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (f"torch {version} is newer than all that labkit was tested with" in done.stderr) == is_named
    assert is_named or not done.stderr


@pytest.mark.parametrize(("version", "status"), [("3.10.14", "FAIL"), ("3.11.0", "OK"), ("3.14.1", "OK")])
def test_old_python_fails(monkeypatch, version, status):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    assert doctor.check_python().status == status


def test_without_torch_the_rest_is_still_examined(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    report = doctor.run_checks()
    assert not report.ok
    assert [finding.status for finding in report.findings if finding.what == "PyTorch"] == ["FAIL"]
    assert len(report.findings) == 2 + len(doctor.OTHER_CHECKS)


def test_no_compiler_fails_lab_4_only(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.check_compiler()
    assert finding.status == "FAIL" and "labs 4, " in finding.labs and "g++" in finding.fix


def test_misspelt_cxx_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "g+++")
    finding = doctor.check_compiler()
    assert finding.status == "FAIL" and "g+++" in finding.detail


def test_missing_jupyter_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "JUPYTER_PACKAGES", ("jupyterlab", "no_such_package"))
    finding = doctor.check_jupyter()
    assert finding.status == "FAIL"
    assert "no_such_package" in finding.detail and "jupyterlab" not in finding.detail


def test_a_notebook_that_is_open_needs_nothing_to_open_it(monkeypatch):
    monkeypatch.setattr(doctor, "JUPYTER_PACKAGES", ("no_such_package",))
    monkeypatch.setattr(doctor, "in_kernel", lambda: True)
    assert doctor.check_jupyter().status == "OK", "as on Google Colab, which has no JupyterLab"


def test_no_loopback_interface_fails_all_labs(monkeypatch):
    monkeypatch.setattr(doctor.psutil, "net_if_addrs", dict)
    finding = doctor.check_loopback()
    assert finding.status == "FAIL" and finding.labs == doctor.EVERY_LAB


def test_unresolvable_localhost_fails(monkeypatch):
    def refuse(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", refuse)
    finding = doctor.check_loopback()
    assert finding.status == "FAIL" and "not known" in finding.detail


@pytest.mark.parametrize(("free_gib", "status"), [(0.5, "NOTE"), (8, "OK")])
def test_little_memory_is_noted(monkeypatch, free_gib, status):
    memory = namedtuple("memory", "available total")(free_gib * doctor.GIB, 16 * doctor.GIB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    assert doctor.check_memory().status == status


def test_unwritable_runs_folder_fails_and_names_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "file" / "runs"))
    finding = doctor.check_runs_folder()
    assert finding.status == "FAIL" and "LABKIT_RUNS" in finding.fix


def test_one_core_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.requirements, "usable_cores", lambda: [0])
    assert doctor.check_cores().status == "NOTE"


def test_report_says_fix_and_labs_as_text_and_as_table():
    report = Diagnosis([Finding("OK", "Cores", "2"), Finding("FAIL", "GPU <x>", "gone", "mend & go", "lab 7")])
    assert not report.ok
    assert str(report).splitlines() == [
        "[OK]   Cores: 2",
        "[FAIL] GPU <x>: gone (lab 7)",
        "       fix: mend & go",
        "1 to mend before every lab can run here.",
    ]
    table = report._repr_html_()
    assert "GPU &lt;x&gt;" in table and "mend &amp; go" in table and table.count("<tr>") == 3


def test_a_note_alone_does_not_fail():
    assert Diagnosis([Finding("NOTE", "Cores", "1")]).ok


def test_a_lab_is_told_what_concerns_it_alone(capsys, monkeypatch):
    findings = [
        Finding("OK", "PyTorch", "2.13"),
        Finding("OK", "Loopback", "answers"),
        Finding("NOTE", "Memory", "1 GiB", labs="labs with 4 ranks"),
        Finding("NOTE", "Convolution", "wrong", labs="lab 1b, strategy native"),
        Finding("FAIL", "Compiler", "none", labs="labs 4, 4b and 4c (torch.compile)"),
        Finding("FAIL", "Folder", "full", labs=doctor.EVERY_LAB),
    ]
    monkeypatch.setattr(doctor, "run_checks", lambda: Diagnosis(findings))
    shown = {}
    for lab in ("0", "1b", "4", "4b", "4c"):
        doctor.show(lab)
        shown[lab] = re.findall(r"\] +(\w+):", capsys.readouterr().out)
    always = ["PyTorch", "Memory", "Folder"]
    assert shown["0"] == always
    assert shown["1b"] == ["PyTorch", "Memory", "Convolution", "Folder"]
    assert shown["4"] == shown["4b"] == shown["4c"] == ["PyTorch", "Memory", "Compiler", "Folder"]


def test_show_prints_text_outside_a_notebook(capsys):
    doctor.show()
    assert "[OK]" in capsys.readouterr().out
