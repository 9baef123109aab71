"""Parse the function ``call`` of an inductor program: its lines, memory, collectives and waits."""

import ast
import math
import re
from collections.abc import Iterator, Sequence
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
    """One line of the program.

    Attributes:
        number: counted from ``def call``, which is line 1.
        kind: views, checks of shapes, reuse of memory and ``return`` are "other".
        name: of the operation, such as ``all_reduce_`` or ``cpp_fused_1``.
        buffers: the inputs (``arg3_1``) and buffers (``buf7``) that it names, each once, in order.
        text: as written.
    """

    number: int
    kind: LineKind
    name: str
    buffers: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class BufferView:
    """A part of the memory that was allocated under the name ``root``.

    ``offset`` is in elements. ``shape`` and ``dtype`` are None if the program does not give them.
    """

    name: str
    root: str
    offset: int = 0
    shape: Shape | None = None
    dtype: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements, -1 if the shape is unknown."""
        return -1 if self.shape is None else math.prod(self.shape)


@dataclass
class CollectiveRequest:
    """A collective.

    Attributes:
        line: starts it.
        sent: the tensors handed in.
        pending: roots of results that have not been waited for.
        waits: lines that wait for it.
        too_early: whether a result was used before a wait.
    """

    line: ProgramLine
    sent: list[BufferView]
    pending: set[str]
    waits: list[ProgramLine] = field(default_factory=list)
    too_early: bool = False

    def is_pending(self, root: str) -> bool:
        """Whether this memory is, or contains, a pending result."""
        return any(result == root or result.startswith(f"{root}[") for result in self.pending)


class InductorProgram:
    """The parsed function, with its lines and collectives in order, and views by name."""

    def __init__(self, code: str):
        self._source = code.splitlines()
        function = _find_call_function(code)
        self.lines: list[ProgramLine] = []
        self.requests: list[CollectiveRequest] = []
        # Inductor assigns every name only once.
        self.views: dict[str, BufferView] = {}
        # Dtypes of inputs stand only in the benchmark that every program has at its end.
        self._dtypes = dict(
            re.findall(r"^\s*(\w+) = rand_strided\(.*dtype=torch\.(\w+)\)", code, re.MULTILINE)
        )
        self._reinterpreted: list[tuple[ProgramLine, BufferView]] = []
        by_line: dict[int, list[ast.stmt]] = {}
        for statement in _flatten_statements(function.body):
            by_line.setdefault(statement.lineno, []).append(statement)
        for lineno, statements in by_line.items():
            self._read_statements(lineno - function.lineno + 1, statements)

    @property
    def all_reduces(self) -> list[CollectiveRequest]:
        """The all-reduces among the requests."""
        return [request for request in self.requests if request.line.name.startswith("all_reduce")]

    def overlap_lines(self, request: CollectiveRequest) -> tuple[ProgramLine, ...]:
        """Return the kernels and externs between a collective and the first wait for it."""
        end = request.waits[0].number if request.waits else math.inf
        compute = self._compute_lines(after=request.line.number)
        return tuple(line for line in compute if line.number < end)

    def _compute_lines(self, after: int = 0) -> list[ProgramLine]:
        return [line for line in self.lines if line.number > after and line.kind in COMPUTE_KINDS]

    def bucket_pieces(self, sent: BufferView, request: ProgramLine) -> list[BufferView]:
        """Return the tensors that were copied into one flat buffer, in order, or the tensor itself.

        The all-reduce takes the flat buffer, or one of the same size that a kernel has made of it.
        """
        candidates = [sent]
        for line in reversed(self._compute_lines()):
            if line.number < request.number and sent.root in self._memory_roots(line):
                views = [self.views[name] for name in line.buffers]
                candidates += [view for view in views if view.elements == sent.elements]
                break
        before = [view for line, view in self._reinterpreted if line.number < request.number]
        for source in candidates:
            by_offset = {view.offset: view for view in before if view.root == source.root}
            parts = [by_offset[offset] for offset in sorted(by_offset)]
            if _is_gapless(parts, sent.elements):
                pieces = [replace(sent, offset=part.offset, shape=part.shape) for part in parts]
                return [self._view_after_wait(piece, request) for piece in pieces]
        return [sent]

    def _view_after_wait(self, part: BufferView, request: ProgramLine) -> BufferView:
        """The part in the first shape that the program gives it after the all-reduce."""
        place = (part.root, part.offset, part.elements)
        for line, view in self._reinterpreted:
            same_place = (view.root, view.offset, view.elements) == place
            if same_place and line.number > request.number:
                return replace(part, shape=view.shape)
        return part

    def _read_statements(self, number: int, statements: Sequence[ast.stmt]) -> None:
        first = statements[0]
        if isinstance(first, ast.Assign) and ast.unparse(first.value) == "args":
            for given in ast.walk(first.targets[0]):
                if isinstance(given, ast.Name):
                    dtype = self._dtypes.get(given.id)
                    self.views[given.id] = BufferView(given.id, given.id, dtype=dtype)
        kind, name = _classify_statement(first)
        self._update_views(first)
        text = " ".join(line.strip() for line in self._source[first.lineno - 1 : first.end_lineno])
        line = ProgramLine(number, kind, name, self._find_buffers(first), text)
        self.lines.append(line)
        for node in ast.walk(first):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor":
                self._reinterpreted.append((line, self._resolve_view(node)))
        call = _get_call(first)
        if call and kind == "wait":
            self._record_wait(line, call)
        elif kind == "collective" or kind in COMPUTE_KINDS or name == "return":
            self._flag_early_use(line)
        if call and kind == "collective":
            self._add_request(line, call, _assignment_targets(first))

    def _add_request(self, line: ProgramLine, call: ast.Call, targets: list[ast.expr]) -> None:
        given = _list_items(call.args[0])
        sent = [self._resolve_view(each) for each in given]
        if line.name.endswith("_"):
            pending = {view.root for view in sent}
        else:
            into = [keyword.value for keyword in call.keywords if keyword.arg == "out"] or targets
            outputs = [each for value in into for each in _list_items(value)]
            pending = {self._resolve_view(output).root for output in outputs}
            # A coalesced collective returns one list, from which its results are taken by index.
            if line.name.endswith("_coalesced"):
                pending = {f"{root}[{index}]" for root in pending for index in range(len(given))}
        self.requests.append(CollectiveRequest(line, sent, pending))

    def _record_wait(self, line: ProgramLine, call: ast.Call) -> None:
        root = self._resolve_view(call.args[0]).root
        for request in self.requests:
            if root in request.pending:
                request.pending.discard(root)
                request.waits.append(line)

    def _flag_early_use(self, line: ProgramLine) -> None:
        roots = self._memory_roots(line)
        for request in self.requests:
            request.too_early |= any(request.is_pending(root) for root in roots)

    def _memory_roots(self, line: ProgramLine) -> set[str]:
        return {self.views[name].root for name in line.buffers}

    def _find_buffers(self, statement: ast.stmt) -> tuple[str, ...]:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        names.sort(key=lambda node: (node.lineno, node.col_offset))
        return tuple(dict.fromkeys(node.id for node in names if node.id in self.views))

    def _update_views(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and target.id.startswith("buf"):
                    view = self._resolve_view(statement.value, target.id)
                    self.views[target.id] = replace(view, name=target.id)
        call = _get_call(statement)
        if call and ast.unparse(call.func) == "assert_size_stride":
            seen = self._resolve_view(call.args[0])
            if seen.name in self.views and seen.shape is None:
                self.views[seen.name] = replace(seen, shape=_literal_shape(call.args[1]))

    def _resolve_view(self, value: ast.expr, new: str = "") -> BufferView:
        """The memory behind an expression; if it is no view, memory of its own called ``new``."""
        if isinstance(value, ast.Name):
            return self.views.get(value.id, BufferView(value.id, value.id))
        if isinstance(value, ast.Subscript):
            seen = self._resolve_view(value.value)
            return BufferView(new, f"{seen.root}[{ast.unparse(value.slice)}]")
        if not isinstance(value, ast.Call):
            return BufferView(new, new)
        kind, name = _classify_call(value)
        if name == "reinterpret_tensor":
            seen = self._resolve_view(value.args[0])
            offset = seen.offset + ast.literal_eval(value.args[3])
            return replace(seen, offset=offset, shape=_literal_shape(value.args[1]))
        if name == "flatten":
            seen = self._resolve_view(value.args[0])
            return replace(seen, shape=None if seen.shape is None else (seen.elements,))
        if kind == "wait":
            return self._resolve_view(value.args[0])
        if kind == "allocation":
            dtype = ast.unparse(value.args[2]).removeprefix("torch.")
            return BufferView(new, new, 0, _literal_shape(value.args[0]), dtype)
        return BufferView(new, new)


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
    raise ValueError(
        f"no function call() in {len(code.splitlines())} lines: "
        "give the whole program that inductor wrote"
    )


def _flatten_statements(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        # On a GPU the program is inside the ``with`` of a device guard.
        if isinstance(statement, ast.With):
            yield from _flatten_statements(statement.body)
        else:
            yield statement


def _get_call(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _list_items(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.List) else [value]


def _assignment_targets(statement: ast.stmt) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else []


def _classify_statement(statement: ast.stmt) -> tuple[LineKind, str]:
    if call := _get_call(statement):
        return _classify_call(call)
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
    """Whether two or more parts fill a buffer of ``elements`` without gaps."""
    ends = [part.offset + part.elements for part in parts]
    return len(parts) > 1 and [0, *ends] == [*(part.offset for part in parts), elements]
