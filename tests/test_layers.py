"""The house of design.md: a module imports only from lower layers, and Jupyter only where it is asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# Every module of labkit, or the package that holds it, with its layer.
LAYERS = {
    "errors": 0,
    "records": 0,
    "theory": 0,
    "config": 0,
    "folder": 0,
    "upstream": 0,
    "compiler": 0,
    "generated": 0,
    "photo": 0,
    "models": 0,
    "tensors": 0,
    "parallel": 1,
    "rank": 2,
    "meter": 2,
    "wire": 2,
    "instrument": 2,
    "trace": 2,
    "timeline": 2,
    "parity": 2,
    "run": 3,
    "failure": 3,
    "process": 3,
    "result": 3,
    "torchrun": 3,
    "worker": 3,
    "progress": 3,
    "simulate": 3,
    "local_ranks": 3,
    "doctor": 3,
    "plots": 4,
    "widgets": 5,
    "checks": 5,
    "magics": 5,
    "__main__": 5,
}
# Imports inside a layer that are meant: (who imports, what).
SIBLINGS = {
    ("records", "errors"),
    ("config", "errors"),
    ("rank", "meter"),
    ("parity", "rank"),
    ("parity", "meter"),
    ("parity", "wire"),
    ("wire", "meter"),
    ("timeline", "trace"),
    ("meter", "timeline"),
    ("failure", "process"),
    ("run", "failure"),
    ("run", "process"),
    ("run", "progress"),
    ("run", "result"),
    ("torchrun", "process"),
    ("torchrun", "worker"),
    ("doctor", "run"),
}
PUBLIC = "__init__"  # labkit/__init__.py hands on names of layers 0 to 3
JUPYTER = ("IPython", "ipywidgets", "ipykernel", "jupyter_client", "jupyterlab", "nbformat", "papermill", "nbval")
PACKAGE = Path(__file__).resolve().parents[1] / "labkit"


def modules():
    """Dotted names of all modules of labkit, such as ``models.convnext``, by file."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[path] = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return names


def imports(source, module, is_package=False):
    """The labkit modules that a source imports anywhere, also inside functions; ``models.convnext`` for its names.

    A bare ``import labkit`` gives ``__init__``.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["labkit", *module.split(".")]
                package = package[: len(package) - node.level + (1 if is_package else 0)]
                base = ".".join([*package, base]).rstrip(".")
            found |= {f"labkit.{alias.name}" for alias in node.names} if base == "labkit" else {base}
    inside = {name for name in found if name == "labkit" or name.startswith("labkit.")}
    return {name.removeprefix("labkit").removeprefix(".") or PUBLIC for name in inside}


def head(name):
    """The entry of LAYERS that a module belongs to."""
    return name.split(".")[0]


def wrong_imports(source, module, is_package=False):
    """What a module must not import, each as a sentence."""
    who = head(module)
    layer = LAYERS[who]
    wrong = []
    for name in sorted(imports(source, module, is_package)):
        target = head(name)
        if target not in LAYERS:
            target = PUBLIC  # a public name: from labkit import run_something
        target_layer = 3.5 if target == PUBLIC else LAYERS[target]
        if target == who or target_layer < layer or (who, target) in SIBLINGS:
            continue
        wrong.append(f"{module} (layer {layer}) imports {name} (layer {target_layer})")
    return wrong


def test_every_module_has_a_layer():
    unknown = {head(name) for name in modules().values()} - LAYERS.keys() - {PUBLIC}
    assert not unknown, f"give {sorted(unknown)} a layer in design.md and here"


def test_a_module_imports_only_from_lower_layers():
    wrong = []
    for path, module in modules().items():
        if module != PUBLIC and head(module) in LAYERS:
            wrong += wrong_imports(path.read_text(), module, path.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


def test_public_module_takes_nothing_above_layer_3():
    names = imports((PACKAGE / "__init__.py").read_text(), PUBLIC, is_package=True)
    assert not [name for name in names if LAYERS.get(head(name), 0) > 3]


@pytest.mark.parametrize(
    ("module", "source", "is_wrong"),
    [
        ("models.convnext", "from labkit.rank import session", True),
        ("models.convnext", "def f():\n    import labkit.rank", True),
        ("models.convnext", "import labkit", True),
        ("models.convnext", "from ..rank import session", True),
        ("models.convnext", "from .toy import ToyModel", False),
        ("parallel.spatial", "from labkit.models import convnext", False),
        ("run", "from labkit import plots", True),
        ("run", "import labkit", True),
        ("run", "from labkit import result, errors", False),
        ("rank", "import labkitten", False),
        ("plots.compare", "from labkit import RunResult", False),
        ("checks.halo", "import labkit", False),
    ],
)
def test_the_rule_itself(module, source, is_wrong):
    assert bool(wrong_imports(source, module)) == is_wrong


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
    names = [f"labkit.{name}".removesuffix(f".{PUBLIC}") for name in modules().values()]
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
