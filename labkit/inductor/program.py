"""Parse the function ``call`` of an inductor program: its lines, memory, collectives and waits."""

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

LineKind = Literal["collective", "wait", "kernel", "extern", "allocation", "free", "other"]
Shape = tuple[int, ...]
COMPUTE_KINDS = ("kernel", "extern")
# The kind of a call is that of the first pattern that matches its full name.
_CALL_PATTERNS: tuple[tuple[LineKind, str], ...] = (
    ("wait", r"torch\.ops\._c10d_functional\.(wait_tensor)\."),
    ("collective", r"torch\.ops\._c10d_functional\.(\w+)\."),
    ("kernel", r"(cpp_fused\w*|cpp_CppMicroGemm\w*)$|(\w+)\.run$"),
    ("extern", r"extern_kernels\.(\w+)$"),
    # A view of the same memory computes nothing.
    ("other", r"torch\.ops\.aten\.(flatten)\."),
    ("extern", r"torch\.ops\.\w+\.(\w+)"),
    ("allocation", r"(empty_strided\w*)$"),
)


@dataclass(frozen=True)
class ProgramLine:
    """One line of the program."""

    number: int  # counted from ``def call``, which is line 1
    kind: LineKind  # views, checks of shapes, reuse of memory and ``return`` are "other"
    name: str  # of the operation, such as ``all_reduce_`` or ``cpp_fused_1``
    buffers: tuple[str, ...]  # the inputs (arg3_1) and buffers (buf7) it names, each once, in order
    text: str  # as written


@dataclass(frozen=True)
class BufferView:
    """A part of the memory that was allocated under the name ``root``."""

    name: str
    root: str
    offset: int = 0  # in elements
    shape: Shape | None = None  # None if the program does not give it, as the dtype
    dtype: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements, -1 if the shape is unknown."""
        return -1 if self.shape is None else math.prod(self.shape)


@dataclass
class CollectiveRequest:
    """A collective, and what the program does with its results."""

    line: ProgramLine
    sent: list[BufferView]
    pending: set[str]  # roots of results that have not been waited for
    waits: list[ProgramLine] = field(default_factory=list)
    too_early: bool = False  # whether a result was used before a wait


class InductorProgram:
    """The parsed function, with its lines and collectives in order, and views by name."""

    def __init__(self, code: str):
        self.lines: list[ProgramLine] = []
        self.requests: list[CollectiveRequest] = []
        # Inductor assigns every name only once.
        self.views: dict[str, BufferView] = {}
        self._reinterpreted: list[tuple[int, BufferView]] = []
        # Dtypes of inputs stand only in the benchmark that every program has at its end.
        inputs = r"^\s*(\w+) = rand_strided\(.*dtype=torch\.(\w+)\)"
        self._dtypes = dict(re.findall(inputs, code, re.MULTILINE))
        source, function = code.splitlines(), _find_call_function(code)
        for statement in _first_statements(function):
            start = statement.lineno
            text = " ".join(line.strip() for line in source[start - 1 : statement.end_lineno])
            self._read_statement(start - function.lineno + 1, statement, text)

    @property
    def all_reduces(self) -> list[CollectiveRequest]:
        """The all-reduces among the requests."""
        return [request for request in self.requests if request.line.name.startswith("all_reduce")]

    def overlap_lines(self, request: CollectiveRequest) -> tuple[ProgramLine, ...]:
        """Return the kernels and externs between a collective and the first wait for it."""
        end = request.waits[0].number if request.waits else math.inf
        compute = [line for line in self.lines if line.kind in COMPUTE_KINDS]
        return tuple(line for line in compute if request.line.number < line.number < end)

    def bucket_pieces(self, sent: BufferView, request: CollectiveRequest) -> list[BufferView]:
        """Return the tensors that were copied into one flat buffer, in order, or the tensor itself.

        The all-reduce takes the flat buffer, or one of the same size that a kernel has made of it.
        """
        start, candidates = request.line.number, [sent]
        compute = [line for line in self.lines if line.kind in COMPUTE_KINDS]
        users = [line for line in compute if sent.root in self._memory_roots(line)]
        makers = [line for line in users if line.number < start]
        # The last one before the all-reduce made what is sent, perhaps of the flat buffer.
        for name in makers[-1].buffers if makers else ():
            if self.views[name].elements == sent.elements:
                candidates.append(self.views[name])
        for source in candidates:
            views = [view for number, view in self._reinterpreted if number < start]
            by_offset = {view.offset: view for view in views if view.root == source.root}
            parts = [by_offset[offset] for offset in sorted(by_offset)]
            if _is_gapless(parts, sent.elements):
                return [self._as_gradient(part, sent, start) for part in parts]
        return [sent]

    def _as_gradient(self, part: BufferView, sent: BufferView, start: int) -> BufferView:
        # Before the all-reduce parts may be flat; the first shape after it is the gradient's own.
        views = (view for number, view in self._reinterpreted if number > start)
        place = (sent.root, part.offset, part.elements)
        own = (v.shape for v in views if (v.root, v.offset, v.elements) == place)
        return replace(sent, offset=part.offset, shape=next(own, part.shape))

    def _read_statement(self, number: int, statement: ast.stmt, text: str) -> None:
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if value:
            self._update_views(targets, value)
        kind, name = _classify_statement(statement)
        # Each buffer once, in the order of the text.
        buffers = dict.fromkeys(word for word in re.findall(r"\w+", text) if word in self.views)
        line = ProgramLine(number, kind, name, tuple(buffers), text)
        self.lines.append(line)
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor":
                self._reinterpreted.append((number, self._resolve_view(node)))
        if kind in ("collective", *COMPUTE_KINDS) or name == "return":
            for request in self.requests:
                request.too_early |= not request.pending.isdisjoint(self._memory_roots(line))
        if isinstance(value, ast.Call) and kind == "wait":
            self._end_request(line, self._resolve_view(value.args[0]).root)
        if isinstance(value, ast.Call) and kind == "collective":
            given = value.args[0].elts if isinstance(value.args[0], ast.List) else value.args[:1]
            sent = [self._resolve_view(each) for each in given]
            # A name that ends in an underscore works in place; other results have their own memory.
            results = sent if name.endswith("_") else map(self._resolve_view, targets)
            self.requests.append(CollectiveRequest(line, sent, {view.root for view in results}))

    def _end_request(self, wait: ProgramLine, root: str) -> None:
        for request in self.requests:
            if root in request.pending:
                request.pending.discard(root)
                request.waits.append(wait)

    def _memory_roots(self, line: ProgramLine) -> set[str]:
        return {self.views[name].root for name in line.buffers}

    def _update_views(self, targets: list[ast.expr], value: ast.expr) -> None:
        nodes = [node for target in targets for node in ast.walk(target)]
        for name in [node.id for node in nodes if isinstance(node, ast.Name)]:
            # ``arg0_1, arg1_1 = args``, the first line
            if ast.unparse(value) == "args":
                self.views[name] = BufferView(name, name, dtype=self._dtypes.get(name))
            elif name.startswith("buf"):
                self.views[name] = replace(self._resolve_view(value, name), name=name)
        # An input's shape stands in a check only.
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "assert_size_stride":
            seen = self._resolve_view(value.args[0])
            if seen.name in self.views and seen.shape is None:
                self.views[seen.name] = replace(seen, shape=_literal_shape(value.args[1]))

    def _resolve_view(self, value: ast.expr, new: str = "") -> BufferView:
        """Return the memory behind an expression; if it is no view, memory of its own, ``new``."""
        if isinstance(value, ast.Name):
            return self.views.get(value.id, BufferView(value.id, value.id))
        if not isinstance(value, ast.Call):
            return BufferView(new, new)
        kind, name = _classify_call(value)
        if kind == "allocation":
            dtype = ast.unparse(value.args[2]).removeprefix("torch.")
            return BufferView(new, new, 0, _literal_shape(value.args[0]), dtype)
        if kind != "wait" and name not in ("reinterpret_tensor", "flatten"):
            return BufferView(new, new)
        seen = self._resolve_view(value.args[0])
        if name == "reinterpret_tensor":
            offset = seen.offset + ast.literal_eval(value.args[3])
            return replace(seen, offset=offset, shape=_literal_shape(value.args[1]))
        if name == "flatten" and seen.shape is not None:
            return replace(seen, shape=(seen.elements,))
        return seen


def _find_call_function(code: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(
            f"line {error.lineno}: not Python ({error.msg}); give the text that inductor wrote"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
    lines = len(code.splitlines())
    raise ValueError(f"no function call() in {lines} lines: give the whole program of inductor")


def _first_statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the first statement of each line: ``buf7 = buf3; del buf3  # reuse``."""
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(function):
        # On a GPU the program is inside the ``with`` of a device guard.
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.With):
            found.setdefault(node.lineno, node)
    return [found[number] for number in sorted(found)]


def _classify_statement(statement: ast.stmt) -> tuple[LineKind, str]:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call):
        return _classify_call(value)
    if isinstance(statement, ast.Delete):
        return "free", "del"
    return "other", "return" if isinstance(statement, ast.Return) else "="


def _classify_call(call: ast.Call) -> tuple[LineKind, str]:
    full_name = ast.unparse(call.func)
    for kind, form in _CALL_PATTERNS:
        if found := re.match(form, full_name):
            return kind, next(name for name in found.groups() if name)
    return "other", full_name.rpartition(".")[2]


def _literal_shape(value: ast.expr) -> Shape | None:
    try:
        return tuple(ast.literal_eval(value))
    # With dynamic shapes, a shape holds symbols.
    except ValueError:
        return None


def _is_gapless(parts: Sequence[BufferView], elements: int) -> bool:
    """Tell whether two or more parts fill a buffer of ``elements`` without gaps."""
    ends = [part.offset + part.elements for part in parts]
    return len(parts) > 1 and [0, *ends] == [*(part.offset for part in parts), elements]
