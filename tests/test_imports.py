"""What importing labkit costs and needs. That nothing imports upward, import-linter holds (`make lint`)."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

from labkit import torch_private
from labkit.launcher import fork_server, torchrun

PUBLIC = "__init__"
JUPYTER = ("IPython", "ipywidgets", "ipykernel", "jupyter_client", "jupyterlab", "nbformat", "papermill", "nbval")
ROOT = Path(__file__).resolve().parents[1]


def modules():
    """Dotted names of all modules of the core and the course, such as ``labkit.models.convnext``."""
    found = [path for package in ("labkit", "labkit_course") for path in sorted((ROOT / package).rglob("*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(f".{PUBLIC}") for path in found]


def fresh(code):
    """Run code in a new interpreter, from another folder."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=Path(sys.executable).parent
    )


def test_importing_labkit_brings_neither_torch_nor_jupyter():
    answer = fresh("import labkit, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))")
    assert answer.returncode == 0, answer.stderr
    loaded = set(answer.stdout.split())
    assert "labkit" in loaded
    assert not loaded & {"torch", "torchvision", *JUPYTER}


def test_every_module_imports_without_any_jupyter_package():
    names = [name for name in modules() if name != "labkit.launcher.magic"]
    code = f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {JUPYTER!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
for name in {names!r}:
    importlib.import_module(name)
print("imported", len({names!r}))
"""
    answer = fresh(code)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip().endswith(f"imported {len(names)}")


def test_what_is_imported_before_ranks_are_forked_is_read_from_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport torch.nn\nfrom labkit.theory import sizes\n\ndef main():\n    import labkit.parity\n"
    )
    names = ["torch.nn", "labkit.theory", "labkit.theory.sizes"]
    assert torchrun.list_imports(program) == names
    program.write_text(program.read_text() + "    here.steps(3, track=[model])\n")
    assert torchrun.list_imports(program) == [*names, torch_private.MEMORY_TRACKER_MODULE]


def test_the_fork_server_imports_what_the_programs_of_launch_import():
    names = fork_server.list_program_modules()
    assert {
        "labkit.models.catalog",
        "labkit.parity.spatial",
        "labkit.parity.two_dim",
        torch_private.MEMORY_TRACKER_MODULE,
    } <= set(names)
    assert len(names) == len(set(names))


def test_what_the_documentation_imports_is_there():
    root, found = ROOT, []
    for page in [*root.glob("*.md"), *root.glob("docs/*.md")]:
        for module, names in re.findall(r"from (labkit[\w.]*) import ([\w, ]+)", page.read_text()):
            for name in names.split(","):
                found.append((module, name.strip().split(" ")[0]))
    assert len(found) >= 5
    missing = [(module, name) for module, name in found if not hasattr(importlib.import_module(module), name)]
    assert missing == []
