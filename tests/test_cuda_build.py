"""torch's CUDA build on a host without a GPU, which is made to look like one that has some: `make cuda-build`."""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixture_cuda import write_site

ROOT = Path(__file__).resolve().parents[1]
CPU_PYTHON = ROOT / ".venv" / "bin" / "python"
ROUNDS = 8

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build: make cuda-build"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU: benchmarks/gpu.py asks more"),
    pytest.mark.skipif(not shutil.which("unshare") or os.geteuid(), reason="a private /dev needs root and unshare"),
    pytest.mark.timeout(600),
]

# A torch that says that there is a GPU, opens its driver, and does to forks what CUDA does.
IMITATING = """
import contextlib
def replace(real):
    opened = []
    def is_available():
        for driver in ("/dev/nvidiactl", "/dev/dxg"):
            with contextlib.suppress(OSError):
                opened.append(os.open(driver, os.O_RDONLY))
        real()
        return True
    return is_available
"""
RUNS = """
import json, time, labkit
for _ in range({rounds}):
    begun = time.perf_counter()
    result = labkit.run("{program}", nproc=2, device="cpu", warm={warm})
    asked = [json.loads(each.artifact("gpus")) for each in result.ranks]
    print(json.dumps([result.info["warm"], time.perf_counter() - begun, asked]))
"""
# A driver of CUDA 12.4, which the build for CUDA 13 finds too old.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
static int other(void) { return 999; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, void *status)
{
    *found = other;
    if (!strcmp(name, "cuInit")) *found = cuInit;
    if (!strcmp(name, "cuDriverGetVersion")) *found = cuDriverGetVersion;
    if (!strcmp(name, "cuGetProcAddress")) *found = cuGetProcAddress_v2;
    return 0;
}
"""


def run_with_driver_file(command, driver, folder, **environment):
    """Run a command where /dev has this file of a driver; return what it printed."""
    dev = folder / "dev"
    dev.mkdir(exist_ok=True)
    steps = [f"mount -t tmpfs dev {shlex.quote(str(dev))}", f"cd {shlex.quote(str(dev))}"]
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        steps.append(f"touch {name} && mount --bind /dev/{name} {name}")
    steps += ["ln -s /proc/self/fd fd", "mkdir shm && mount --rbind /dev/shm shm", f"touch {driver}"]
    steps += ["mount --rbind . /dev", f"cd {shlex.quote(str(ROOT))}", shlex.join(map(str, command))]
    answer = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", "\n".join(steps)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout


def imitate_runs(driver, folder, python=sys.executable, warm=True):
    """Whether each run was warm, its seconds, and what its ranks were told by torch."""
    write_site(folder / "site", IMITATING)
    toolkit = folder / "cuda" / "bin"
    toolkit.mkdir(parents=True, exist_ok=True)
    (toolkit / "nvcc").touch(0o755)
    code = RUNS.format(rounds=ROUNDS, warm=warm, program=ROOT / "tests" / "programs" / "asking_for_gpus.py")
    where = {"PYTHONPATH": f"{folder / 'site'}:{ROOT}", "CUDA_HOME": str(toolkit.parent), "LABKIT_QUEUE": "0"}
    lines = run_with_driver_file([python, "-c", code], driver, folder, **where).splitlines()
    return [json.loads(line) for line in lines if line.startswith("[")]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("driver", ["nvidiactl", "dxg"], ids=["a GPU host", "WSL2"])
def test_ranks_are_forked_before_anyone_has_asked_the_driver(driver, warm, tmp_path):
    """A fork of a process that has asked can use no GPU: "Cannot re-initialize CUDA in forked subprocess"."""
    runs = imitate_runs(driver, tmp_path, warm=warm)
    assert [was_warm for was_warm, _, _ in runs] == [warm] * ROUNDS
    assert [asked for _, _, asked in runs] == [[[True, "cpu", False]] * 2] * ROUNDS


@pytest.mark.skipif(not CPU_PYTHON.exists(), reason="no CPU build beside it: make")
def test_a_warm_run_takes_as_long_as_with_the_cpu_build(tmp_path):
    medians = {}
    for python in (sys.executable, CPU_PYTHON):
        # Of the first run, most is the start of the process that imports for ranks.
        seconds = [each for _, each, _ in imitate_runs("nvidiactl", tmp_path, python)][1:]
        medians[python] = statistics.median(seconds)
    print(f"warm run, median: {medians[sys.executable]:.3f} s, and {medians[CPU_PYTHON]:.3f} s with the CPU build")
    assert medians[sys.executable] < 1.5 * medians[CPU_PYTHON]


@pytest.mark.skipif(not shutil.which("gcc"), reason="the imitated driver is compiled with gcc")
def test_a_driver_that_is_too_old_is_named_by_doctor_and_by_the_run(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    stub = [tmp_path / "driver.c", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(["gcc", "-shared", "-fPIC", *stub], check=True)
    code = (
        "import labkit; from labkit import doctor; print(doctor.check_gpus())\n"
        "print(labkit.run('all_reduce', nproc=2, repeats=1).session['note'])"
    )
    where = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    said = run_with_driver_file([sys.executable, "-c", code], "nvidiactl", tmp_path, **where)
    finding, note = said.split("NOTE")[1], said.strip().splitlines()[-1]
    for text in (finding, note):
        assert "The NVIDIA driver on your system is too old (found version 12040)" in text
    assert "update the driver, or install torch for its CUDA version" in finding
