"""Report what this machine can do, which labs it cannot run, and how to fix that.

    python -m labkit doctor          # as text; --json for a program
    labkit.doctor.show(lab="4b")     # in a notebook: a table of what concerns this lab

Each check returns one Finding. OK: nothing to do. NOTE: every lab runs, but there is something to
know. FAIL: a lab cannot run until the fix is made.
"""

import html
import importlib.util
import inspect
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from labkit import compile_cache, requirements, torch_private
from labkit.launcher.progress import in_kernel
from labkit.requirements import MIN_TORCH_VERSION, UNTESTED_TORCH_VERSION, parse_version
from labkit.runs import private_files
from labkit.runs.folder import runs_folder

GIB = 1024**3
EVERY_LAB = "all labs"
JUPYTER_PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "papermill", "nbval")
SHORT_REPORT = ("PyTorch", "GPUs", "Cores")
COLOURS = {
    "OK": "var(--jp-success-color0, #2e7d32)",
    "NOTE": "#b26a00",
    "FAIL": "var(--jp-error-color1, #c62828)",
}


@dataclass(frozen=True)
class Finding:
    """What was checked and found, and the fix and the labs concerned, if any."""

    status: Literal["OK", "NOTE", "FAIL"]
    what: str
    detail: str
    fix: str = ""
    labs: str = ""

    def concerns(self, lab: str) -> bool:
        """Tell whether somebody who begins this lab, such as 4b, should read it."""
        if self.status == "OK":
            return self.what in SHORT_REPORT
        named = re.match(r"labs? (\d+[bc]?(?:(?:, | and )\d+[bc]?)*)(?! ranks)", self.labs)
        return not named or lab in re.findall(r"\d+[bc]?", named[1])

    def __str__(self) -> str:
        line = f"[{self.status}]".ljust(7) + f"{self.what}: {self.detail}"
        concerned = f" ({self.labs})" if self.labs and self.status != "OK" else ""
        return f"{line}{concerned}" + (f"\n       fix: {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, shown as a table in a notebook and as text elsewhere."""

    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        """Whether every lab can run here."""
        return all(finding.status != "FAIL" for finding in self.findings)

    def __str__(self) -> str:
        failed = sum(finding.status == "FAIL" for finding in self.findings)
        to_mend = f"{failed} to mend before every lab can run here."
        verdict = to_mend if failed else "Every lab can run here."
        return "\n".join([*map(str, self.findings), verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left">'
        table = f"<tr>{cell}{cell}what{cell}seen{cell}fix{cell}labs"
        for finding in self.findings:
            status, *texts = asdict(finding).values()
            label = f'<b style="color:{COLOURS[status]}">{status}</b>'
            table += f"<tr>{cell}" + cell.join([label, *map(html.escape, texts)])
        return f"<table>{table}</table>"


def check_python() -> Finding:
    """Check the interpreter's version."""
    detail = f"{platform.python_version()} at {display_path(sys.executable)}"
    if parse_version(platform.python_version()) < (3, 11):
        return Finding("FAIL", "Python", detail, "install Python 3.11 or newer", EVERY_LAB)
    return Finding("OK", "Python", detail)


def check_torch() -> Finding:
    """Check PyTorch's version and build."""
    least, most = (".".join(map(str, each)) for each in (MIN_TORCH_VERSION, UNTESTED_TORCH_VERSION))
    fix = f"pip install 'torch>={least},<{most}'"
    try:
        import torch
    # A missing shared library raises an OSError.
    except (ImportError, OSError) as error:
        return Finding("FAIL", "PyTorch", f"not importable: {error}", fix, EVERY_LAB)
    if not hasattr(torch, "version"):
        fix = "rename it, or take its folder off PYTHONPATH"
        return Finding("FAIL", "PyTorch", f"hidden by {inspect.getfile(torch)}", fix, EVERY_LAB)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    detail = f"{torch_private.TORCH_VERSION}, built for {build}"
    version = parse_version(torch_private.TORCH_VERSION)
    if version < MIN_TORCH_VERSION:
        return Finding("FAIL", "PyTorch", detail, fix, EVERY_LAB)
    if version >= UNTESTED_TORCH_VERSION:
        detail += f", and labkit was tested up to torch {torch_private.SEEN[-1]}"
        return Finding("FAIL", "PyTorch", detail, fix, "any lab may stop")
    if not torch.distributed.is_available():
        detail, fix = f"{detail}, without torch.distributed", "install an official build of PyTorch"
        return Finding("FAIL", "PyTorch", detail, fix, EVERY_LAB)
    return Finding("OK", "PyTorch", detail)


def display_path(path: str | Path) -> str:
    """Return a path relative to labkit's checkout if it is inside."""
    # A saved notebook should not reveal private folders.
    path, checkout = Path(path), Path(__file__).parents[1]
    return str(path.relative_to(checkout)) if path.is_relative_to(checkout) else str(path)


def check_sharded_convolution() -> Finding:
    """Check DTensor's own convolution on sharded images, which has been wrong on every version."""
    version, seen = parse_version(torch_private.TORCH_VERSION), "wrong"
    if version not in {(2, 11, 0), (2, 12, 0), (2, 13, 0), (2, 14, 1)}:
        seen = "never measured by labkit, so it counts as wrong, as on 2.11 to 2.14,"
    why = requirements.NATIVE_CONVOLUTION if version >= (2, 12) else "gradients are lost"
    detail = f"{seen} on torch {torch_private.TORCH_VERSION} ({why})"
    fix, labs = "use strategy local or dtensor", "lab 1b, strategy native"
    return Finding("NOTE", "DTensor's own sharded convolution", detail, fix, labs)


def check_torch_features() -> Finding:
    """Check for features of a later torch, which only skipped tests need."""
    if found := requirements.torch_feature_problem():
        return Finding("NOTE", "Older PyTorch", found, labs="no lab, tests of it are skipped")
    return Finding("OK", "Older PyTorch", "nothing that labkit does is missing in this version")


def check_inductor_pass() -> Finding:
    """Check for inductor's pass over collectives."""
    what, version = "Inductor's own pass", requirements.torch_version()
    if version < (2, 12):
        return Finding("NOTE", what, "only from torch 2.12 on", labs="lab 4c, bucketing inductor")
    sizes = "" if version >= (2, 13) else ", without sizes of buckets"
    detail = f"here{sizes}; experimental, and off by default (pytorch/pytorch#188332)"
    return Finding("OK", what, detail)


def check_private_names() -> Finding:
    """Check the private names of torch that labkit uses; a newer torch may have moved some."""
    what, missing = "Private names of PyTorch", torch_private.missing_names()
    if not missing:
        detail = f"all {len(torch_private.PRIVATE_NAMES)} that labkit uses are here"
        return Finding("OK", what, detail)
    detail = f"{len(missing)} moved: {', '.join(each.path for each in missing)}"
    fix = f"pip install torch=={torch_private.SEEN[-1]}"
    lost = dict.fromkeys(each.lost for each in missing)
    return Finding("FAIL", what, detail, fix, "; ".join(lost))


def check_compiler() -> Finding:
    """Check for a C++ compiler, which torch.compile calls for CPU code."""
    if seen := requirements.compiler_problem():
        fix = requirements.COMPILER_FIX
        return Finding("FAIL", "C++ compiler", seen, fix, "labs 4, 4b and 4c (torch.compile)")
    command = [requirements.compiler_name(), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return Finding("OK", "C++ compiler", (answer.stdout.splitlines() or command)[0])


def check_compiled_code() -> Finding:
    """Check for libraries that a stopped compile has left where torch compiles without labkit."""
    what, folders = "Compiled code", compile_cache.folders_of_torch()
    partial = [path for folder in folders for path in compile_cache.partial_libraries(folder)]
    if not partial:
        return Finding("OK", what, "no library that a stopped compile has left unfinished")
    detail = f"{len(partial)} unfinished, such as {partial[0]}: a bare torchrun fails to load them"
    fix = f"rm {shlex.join(map(str, partial))}"
    return Finding("NOTE", what, detail, fix, "lab 4 under a bare torchrun")


def check_cores() -> Finding:
    """Check the number of cores that this process may use."""
    # A container or taskset may allow fewer than the machine has.
    cores = len(requirements.usable_cores())
    if cores < 2:
        turns = "none needed: ranks take turns, so timings show mechanism, not speed"
        fix = f"{turns}; LABKIT_RECORDED=1 takes results of the labs' runs from another machine"
        return Finding("NOTE", "Cores", "1", fix)
    return Finding("OK", "Cores", f"{cores}; more ranks than that show mechanism, not speed")


def check_memory() -> Finding:
    """Check the free memory."""
    memory, limit_file = psutil.virtual_memory(), Path("/sys/fs/cgroup/memory.max")
    total = memory.total
    # A container's limit is below the machine's memory.
    if limit_file.exists() and (limit := limit_file.read_text().strip()).isdigit():
        total = min(total, int(limit))
    available = min(memory.available, total)
    detail = f"{available / GIB:.1f} GiB free of {total / GIB:.1f}"
    # A small rank takes about 0.4 GiB, and a lab starts up to four beside the notebook's process.
    if available < 3 * GIB:
        fix = "close other programs, or use nproc=2; a rank killed with SIGKILL ran out of memory"
        return Finding("NOTE", "Memory", detail, fix, "labs with 4 ranks")
    return Finding("OK", "Memory", detail)


def check_gpus() -> Finding:
    """Check for CUDA devices, which no lab needs."""
    import torch

    count, problem = requirements.usable_gpus()
    if problem:
        driver = "update the driver, or install torch for its CUDA version: docs/install.md"
        return Finding("NOTE", "GPUs", f"{problem}: ranks run on CPU with gloo", driver)
    if not count:
        return Finding("OK", "GPUs", "no GPU that this PyTorch can use: ranks run on CPU with gloo")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    detail = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if not torch.distributed.is_nccl_available():
        return Finding("NOTE", "GPUs", f"{detail}, but this PyTorch has no NCCL: ranks run on CPU")
    return Finding("OK", "GPUs", f"{detail}; runs with more ranks than that use CPU")


def check_loopback() -> Finding:
    """Check the interface over which ranks of one machine communicate."""
    addresses = [each.address for group in psutil.net_if_addrs().values() for each in group]
    if requirements.LOOPBACK not in addresses:
        problem = f"no interface holds {requirements.LOOPBACK}"
    else:
        problem = requirements.loopback_problem()
    try:
        address = socket.gethostbyname("localhost")
    except OSError as error:
        problem = problem or f"localhost has no address: {error}"
    if problem:
        return Finding("FAIL", "Loopback", problem, requirements.LOOPBACK_FIX, EVERY_LAB)
    return Finding("OK", "Loopback", f"{requirements.LOOPBACK} answers; localhost is {address}")


def check_jupyter() -> Finding:
    """Check for the packages that open, run and verify the notebooks."""
    # In an open notebook nothing is left to be opened: Colab has none of the others.
    names = ("ipywidgets",) if in_kernel() else JUPYTER_PACKAGES
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        seen = f"{', '.join(missing)} missing; rank programs run all the same"
        return Finding("FAIL", "Jupyter", seen, "pip install 'labkit[notebook]'", "all notebooks")
    return Finding("OK", "Jupyter", "all packages are here")


def check_runs_folder() -> Finding:
    """Check that runs can be recorded in their folder."""
    folder = runs_folder()
    # Only writing a file tells whether a full or read-only disk takes one.
    try:
        private_files.make_private_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder):
            free_gib = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        detail = f"{folder}: {error.strerror or error}"
        fix = "set LABKIT_RUNS to a folder that you may write to"
        return Finding("FAIL", "Runs folder", detail, fix, EVERY_LAB)
    return Finding("OK", "Runs folder", f"{display_path(folder)}, {free_gib:.0f} GiB free")


TORCH_CHECKS = (
    *(check_sharded_convolution, check_torch_features, check_inductor_pass),
    *(check_private_names, check_gpus),
)
OTHER_CHECKS = (
    *(check_compiler, check_compiled_code, check_cores, check_memory, check_loopback),
    *(check_runs_folder, check_jupyter),
)


def run_checks() -> Diagnosis:
    """Run every check, in about three times the time that importing torch takes."""
    findings = [check_python(), check_torch()]
    # The other checks of torch would fail with an import error.
    if findings[-1].status != "FAIL":
        findings += [check() for check in TORCH_CHECKS]
    return Diagnosis(findings + [check() for check in OTHER_CHECKS])


def show(lab: str = "") -> None:
    """Show the report, as a table in a notebook and as text elsewhere.

    With a lab, such as "4b", only what is good to know before that lab.
    """
    report = run_checks()
    if lab:
        report = Diagnosis([each for each in report.findings if each.concerns(lab)])
    if "IPython" in sys.modules:
        from IPython.display import display

        display(report)
    else:
        print(report)
