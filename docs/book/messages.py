"""Every error message of labkit, read from the code, for the page on troubleshooting.

A message is what a ``raise`` hands to its exception. Names are followed to what was assigned to them in the same
function, to constants, and to what functions return, and a value that only a run knows is shown as "…".
"""

import ast
import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("labkit", "labkit_course", "labkit_simulate", "labkit_cluster", "launch")
CHECKS = "labkit_course/checks"
VALUE = "…"
MAX_VARIANTS = 8
MAX_DEPTH = 12
SYMPTOMS = {
    "refused": "A value is refused",
    "failed": "A rank fails, or a run does not end",
    "machine": "A run cannot start here",
    "files": "A recorded run, a save or a file cannot be read",
    "parity": "Numbers differ from one device's",
    "hosts": "Hosts and clusters",
    "simulation": "Simulation, estimates and plans",
    "checks": "A check judges an exercise",
    "course": "Copies, progress and exports",
    "doctor": "The doctor reports",
}
CLASSES = {
    "refused": "ParameterError ValueError TypeError UsageError UnknownValue AttributeError KeyError IndexError",
    "failed": "RankFailed RunTimedOut MemoryCapExceeded PayloadError RecursionError NotImplementedError RuntimeError",
    "files": "RecordError RunFileNotFound CheckpointError FileNotFoundError",
    "parity": "AssertionError",
}
FILES = {
    "refused": "config.py program_source.py checkpointing.py",
    "failed": "failure.py magic.py worker.py",
    "files": "records.py folder.py saving.py safe_checkpoint.py history.py compile_cache.py private_files.py",
    "parity": "verdict.py",
}
"""Where a text is told that no exception of CLASSES has."""
TELLING = re.compile(r"problem|error|reason|refus|fail|fix|explain|remark|lost|shortage|interrupt|warn|hiding|missing")
TELLING_CONSTANT = re.compile(r"_(FIX|MEANING|MEANINGS|PROBLEM|HINT|REASON|RULE|TEXT|CAUSES?|FIXES)$|^FIX$|SHORTAGE")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    """What labkit says, the exception that says it, and the file in which it is raised."""

    text: str
    raised: str
    file: str
    symptom: str


class Module:
    """One file: its functions, constants and exceptions."""

    def __init__(self, path: Path, root: Path):
        self.file = path.relative_to(root).as_posix()
        self.tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, Function)}
        self.constants = dict(assignments(self.tree.body))


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Each name that statements assign to, with what is assigned."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(name, ast.Name):
                        yield name.id, value


class Reader:
    """Reads what expressions say."""

    def __init__(self, modules: list[Module]):
        self.modules = modules
        self.constants: dict[str, tuple[Module, ast.expr]] = {}
        self.functions: dict[str, tuple[Module, Function]] = {}
        self.exceptions: dict[str, tuple[Module, ast.ClassDef]] = {}
        for module in modules:
            self.constants |= {name: (module, value) for name, value in module.constants.items() if name.isupper()}
            self.functions |= {name: (module, node) for name, node in module.functions.items()}
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self.exceptions[node.name] = (module, node)

    def texts(self, node: ast.expr | None, module: Module, around: list[Function], depth: int = 0) -> list[str]:
        """What an expression may say: one text for each way through it, values as VALUE."""
        if depth > MAX_DEPTH or node is None:
            return [VALUE]

        def again(other: ast.expr | None) -> list[str]:
            return self.texts(other, module, around, depth + 1)

        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return joined(again(part) for part in parts)
            case ast.FormattedValue(value=value):
                return again(value) if isinstance(value, ast.Name | ast.Attribute | ast.Call) else [VALUE]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined([again(left), again(right)])
            case ast.IfExp(body=one, orelse=other):
                return unique([*again(one), *again(other)])
            case ast.BoolOp(values=values):
                return unique(text for value in values for text in again(value))
            case ast.Subscript(value=ast.Name(id=name)) | ast.Subscript(value=ast.Attribute(attr=name)):
                return self._table(name, module)
            case ast.Name(id=name):
                return self._name(name, node.lineno, module, around, depth)
            case ast.Attribute(attr=name) if name in self.constants:
                there, value = self.constants[name]
                return self.texts(value, there, [], depth + 1)
            case ast.Call(func=ast.Name(id="str" | "shorten" | "repr"), args=[argument, *_]):
                return again(argument)
            case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=elements)]):
                return joined(again(element) for element in elements)
            case ast.Call(func=ast.Attribute(attr="rstrip" | "strip", value=value)):
                return again(value)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return self._returned(name, depth)
        return [VALUE]

    def _name(self, name: str, line: int, module: Module, around: list[Function], depth: int) -> list[str]:
        for place, function in reversed(list(enumerate(around))):
            if found := reaching(function.body, name, line):
                outside = around[: place + 1]
                return unique(text for value in found for text in self.texts(value, module, outside, depth + 1))
        if name in module.constants:
            return self.texts(module.constants[name], module, [], depth + 1)
        if name in self.constants:
            there, value = self.constants[name]
            return self.texts(value, there, [], depth + 1)
        return [VALUE]

    def _table(self, name: str, module: Module) -> list[str]:
        value = module.constants.get(name) or self.constants.get(name, (None, None))[1]
        if isinstance(value, ast.Dict):
            return unique(text for each in value.values for text in self.texts(each, module, [], 1))
        return [VALUE]

    def _returned(self, name: str, depth: int) -> list[str]:
        if name not in self.functions or not TELLING.search(name):
            return [VALUE]
        module, function = self.functions[name]
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        return unique(text for value in values for text in self.texts(value, module, [function], depth + 1))

    def messages(self) -> Iterator[Message]:
        """Every message, with some more than once."""
        for module in self.modules:
            for node, around in walk(module.tree, []):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    yield from self._raised(node.exc, module, around)
                elif isinstance(node, ast.Call) and name_of(node.func) in ("Finding", "warn"):
                    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                        yield from self._said(argument, module, around, "")
                elif isinstance(node, ast.Return) and node.value and around and TELLING.search(around[-1].name):
                    yield from self._said(returned(node.value), module, around, "")
            for name, value in module.constants.items():
                # A hint of a check would give the answer away.
                if TELLING_CONSTANT.search(name) and not module.file.startswith(CHECKS):
                    for part in value.values if isinstance(value, ast.Dict) else [value]:
                        yield from self._said(part, module, [], "")

    def _raised(self, call: ast.Call, module: Module, around: list[Function]) -> Iterator[Message]:
        raised = name_of(call.func)
        if raised in self.exceptions:
            there, definition = self.exceptions[raised]
            for node in ast.walk(definition):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and node.args:
                    functions = [each for each in definition.body if isinstance(each, Function)]
                    yield from self._said(node.args[0], there, functions, raised)
        # What a check expects, and its hint, would give the answer away.
        for argument in call.args:
            yield from self._said(argument, module, around, raised)

    def _said(self, node: ast.expr, module: Module, around: list[Function], raised: str) -> Iterator[Message]:
        for text in self.texts(node, module, around):
            text = re.sub(rf"{VALUE}(\s*{VALUE})+", VALUE, " ".join(text.split()))
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3:
                yield Message(text, raised, module.file, symptom(raised, module.file))


def returned(node: ast.expr) -> ast.expr:
    """What a function says that returns an exception, or the text itself."""
    if isinstance(node, ast.Call) and name_of(node.func)[:1].isupper() and node.args:
        return node.args[0]
    return node


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def walk(node: ast.AST, around: list[Function]) -> Iterator[tuple[ast.AST, list[Function]]]:
    """Every node, with the functions that it is in, the outermost first."""
    for child in ast.iter_child_nodes(node):
        inside = [*around, child] if isinstance(child, Function) else around
        yield child, inside
        yield from walk(child, inside)


def reaching(body: list[ast.stmt], name: str, line: int) -> list[ast.expr]:
    """What a name may hold at a line of these statements, by the assignments above it."""
    found: list[ast.expr] = []
    for node in body:
        if node.lineno >= line:
            break
        if isinstance(node, Function | ast.ClassDef) or (not hasattr(node, "body") and not hasattr(node, "cases")):
            found = [value for target, value in assignments([node]) if target == name] or found
        elif (node.end_lineno or 0) >= line:
            return reaching(branch_of(node, line), name, line) or found
        else:
            # It may have been taken or not.
            within = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
            found += [value for target, value in assignments(within) if target == name]
    return found


def branch_of(node: ast.stmt, line: int) -> list[ast.stmt]:
    """The block of a statement in which a line lies."""
    branches = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
    branches += [part.body for field in ("cases", "handlers") for part in getattr(node, field, [])]
    return next((each for each in branches if each and each[0].lineno <= line <= (each[-1].end_lineno or 0)), [])


def joined(parts: Iterator[list[str]] | list[list[str]]) -> list[str]:
    """Every way to put one text of each part behind the other, up to MAX_VARIANTS of them."""
    return ["".join(texts) for texts in itertools.islice(itertools.product(*parts), MAX_VARIANTS)]


def unique(texts: Iterator[str] | list[str]) -> list[str]:
    """Texts without repetition, in their order."""
    return list(dict.fromkeys(texts))[:MAX_VARIANTS]


def symptom(raised: str, file: str) -> str:
    """The key in SYMPTOMS of what a reader sees first."""
    if file.startswith((CHECKS, "labkit_course/judging")):
        return "checks"
    for folder, key in (
        ("labkit_cluster", "hosts"),
        ("labkit_simulate", "simulation"),
        ("labkit_course", "course"),
    ):
        if file.startswith(folder):
            return key
    if file == "labkit/doctor.py":
        return "doctor"
    if file.startswith("labkit/parity") and raised in ("AssertionError", ""):
        return "parity"
    for key, classes in CLASSES.items():
        if raised in classes.split():
            return key
    for key, files in FILES.items():
        if file.endswith(tuple(files.split())):
            return key
    return "machine"


def read_messages(root: Path) -> list[Message]:
    """Every message of the code, once, sorted by symptom and words."""
    modules = [Module(path, root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    found: dict[str, Message] = {}
    for message in Reader(modules).messages():
        # What differs in values alone is one message.
        key = sort_key(message.text)
        before = found.get(key)
        if before is None or (message.raised and not before.raised):
            found[key] = message
    order = list(SYMPTOMS)
    return sorted(found.values(), key=lambda message: (order.index(message.symptom), sort_key(message.text)))


def sort_key(text: str) -> str:
    """A message's words alone."""
    return re.sub(r"[^a-z ]", "", text.lower()).strip()


PLACE = "<!-- the box -->\n"
SEARCH = """
<div class="message-search" hidden>
<label for="message">A message, or some of its words</label>
<textarea id="message" rows="3" spellcheck="false"></textarea>
<p id="message-answer" role="status"></p>
</div>
"""


def page(text: str, root: Path) -> str:
    """The page on troubleshooting with a box to search in, and all messages below its own text."""
    messages = read_messages(root)
    head, _, rest = text.partition(PLACE)
    lines = [f"{head}{SEARCH}{rest}", "## All messages", ""]
    lines += [f"{len(messages)} messages, by what you see. Values that differ from run to run are shown as {VALUE}."]
    for key, heading in SYMPTOMS.items():
        rows = [message for message in messages if message.symptom == key]
        if rows:
            lines += ["", f"### {heading}", "", "{.messages}", *map(row, rows)]
    return "\n".join(lines) + "\n"


def row(message: Message) -> str:
    """A message as an entry of a list."""
    shown = html.escape(message.text, quote=False).replace("\\", "\\\\")
    shown = re.sub(r"([`*_\[\]{}$#|~])", r"\\\1", shown)
    raised = f"`{message.raised}` in " if message.raised else ""
    return f"- {shown} ({raised}`{message.file}`)"
