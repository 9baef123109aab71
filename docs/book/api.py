"""The pages of the API, from the code's own docstrings, which are read and not imported."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGES = {
    "labkit": ("labkit", "labkit"),
    "launcher": ("Launching runs: labkit.launcher", "labkit/launcher"),
    "runs": ("Recorded runs: labkit.runs", "labkit/runs"),
    "session": ("Inside a rank: labkit.session", "labkit/session"),
    "parallel": ("Techniques: labkit.parallel", "labkit/parallel"),
    "parity": ("Parity: labkit.parity", "labkit/parity"),
    "theory": ("Formulas: labkit.theory", "labkit/theory"),
    "models": ("Models: labkit.models", "labkit/models"),
    "tensors": ("Tensors: labkit.tensors", "labkit/tensors"),
    "inductor": ("Compiled programs: labkit.inductor", "labkit/inductor"),
    "plots": ("Figures: labkit.plots", "labkit/plots"),
    "launch": ("Rank programs: launch", "launch"),
    "simulate": ("Simulation: labkit_simulate", "labkit_simulate"),
    "cluster": ("Hosts and clusters: labkit_cluster", "labkit_cluster"),
    "course": ("The course: labkit_course", "labkit_course"),
}
"""A page's name, its heading, and its folder, whose other pages' folders it leaves to them."""
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields|Examples?|Source|Sources):$")
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages(root: Path) -> dict[str, str]:
    """Every page of the API as Markdown, by its path in the book."""
    found = {f"api/{name}.md": page(root, *entry) for name, entry in PAGES.items()}
    lines = [
        "# API",
        "",
        "Every public name, from the docstrings.",
        "",
        "| page | what it holds |",
        "|---|---|",
    ]
    for name, (heading, folder) in PAGES.items():
        first = docstring(ast.parse((root / folder / "__init__.py").read_text())).partition("\n\n")[0]
        lines.append(f"| [{heading}]({name}.md) | {as_markdown(' '.join(first.split()))} |")
    entries = "\n".join(PAGES)
    found["api/index.md"] = "\n".join(lines) + f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    return found


def page(root: Path, heading: str, folder: str) -> str:
    """One page: the modules of a folder, each with its public functions and classes."""
    others = [root / other for _, other in PAGES.values() if other != folder and other.startswith(folder + "/")]
    text = [f"# {heading}", ""]
    for path in sorted((root / folder).rglob("*.py"), key=lambda path: (path.stem != "__init__", path)):
        if any(other in path.parents for other in others) or is_private(path.stem):
            continue
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        text += module_text(name, ast.parse(path.read_text()))
    return "\n".join(text) + "\n"


def module_text(name: str, tree: ast.Module) -> Iterator[str]:
    """A module's docstring, functions and classes."""
    yield from [
        f"## {name}",
        "",
        f"```{{py:module}} {name}",
        "```",
        "",
        as_markdown(docstring(tree)),
        "",
    ]
    for node in tree.body:
        if isinstance(node, Node) and not is_private(node.name) and not is_overload(node):
            yield from object_text(name, node, "")


def object_text(module: str, node: Node, owner: str) -> Iterator[str]:
    """The directive of a function, method or class, and those of a class's methods."""
    fence = ":::" if owner else "::::"
    name = f"{owner}.{node.name}" if owner else node.name
    if isinstance(node, ast.ClassDef):
        yield f"{fence}{{py:class}} {name}{signature(constructor(node))}"
    else:
        decorators = {ast.unparse(each) for each in node.decorator_list}
        is_property = bool(decorators & {"property", "functools.cached_property", "cached_property"})
        kind = "py:property" if is_property else "py:method" if owner else "py:function"
        yield f"{fence}{{{kind}}} {name}" + ("" if is_property else signature(node, method=bool(owner)))
        if is_property and node.returns:
            yield f":type: {ast.unparse(node.returns)}"
    yield from [f":module: {module}", "", as_markdown(docstring(node)), ""]
    if isinstance(node, ast.ClassDef):
        yield from field_lines(node)
        for each in node.body:
            is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not is_private(each.name) and not is_overload(each):
                yield from object_text(module, each, name)
    yield from [fence, ""]


def field_lines(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a class that have a text below them, as a list."""
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
            if not (isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)):
                continue
            shown = " ".join(ast.unparse(field).split())
            yield f"- `` {shown} ``: {' '.join(as_markdown(below.value.value).split())}"
    yield ""


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """A class's ``__init__``, if it has one."""
    return next(
        (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"),
        None,
    )


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | None, method: bool = True) -> str:
    """The parameters in parentheses, without ``self``, and what is returned."""
    if node is None:
        return ""
    arguments = ast.unparse(node.args)
    if method:
        arguments = re.sub(r"^(self|cls)(, (/, )?|$)", "", arguments)
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"({arguments}){returned}"


def is_private(name: str) -> bool:
    """Whether a name is for its module alone."""
    return name.startswith("_") and name not in ("__init__", "__main__")


def is_overload(node: Node) -> bool:
    """Whether a function is there for type checkers alone."""
    return any(ast.unparse(each).endswith(("overload", ".setter")) for each in node.decorator_list)


def docstring(node: ast.AST) -> str:
    """The docstring of a module, class or function, without indentation."""
    return ast.get_docstring(node) or ""  # type: ignore[arg-type]


def as_markdown(text: str) -> str:
    """A docstring in Google's style as Markdown: sections become lists, and nothing is taken for HTML."""
    text = re.sub(r"(?<=[a-z]-)\n(?=[a-z])", "", text)
    lines, inside, code = [], "", False
    for line in text.split("\n"):
        code = line.startswith("    ") and (code or not lines or not lines[-1].strip()) and not inside
        section = SECTION.match(line)
        if section:
            inside = section[1]
            lines += ["", f"**{inside}**", ""]
        elif inside and line.strip() and not line.startswith(" "):
            inside = ""
            lines += ["", escaped(line)]
        elif inside in ("Args", "Attributes", "Raises") and re.match(r" {4}\S", line):
            name, colon, rest = line.strip().partition(":")
            lines.append(f"- `{name}`: {escaped(rest.strip())}" if colon else f"- {escaped(line.strip())}")
        elif inside:
            lines.append("  " + escaped(line.strip()))
        else:
            lines.append(line if code else escaped(line))
    return "\n".join(lines)


def escaped(line: str) -> str:
    """A line whose signs outside code mean nothing to Markdown but emphasis, lists and tables."""
    parts = re.split(r"(``.+?``|`[^`]*`)", line)
    parts[::2] = [re.sub(r"([<$\[\]]|\*\*|(?<!\w)_(?=\w))", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
