"""The function ``call`` of an inductor program, statement by statement: lines, memory, requests and
their waits.
"""

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

LineKind = Literal["collective", "wait", "kernel", "extern", "allocation", "free", "other"]
Shape = tuple[int, ...]
COMPUTE_KINDS = ("kernel", "extern")
_CALL_PATTERNS: tuple[
    tuple[LineKind, str], ...
] = (  # what a call is, by its full name: the first that matches
    ("wait", r"torch\.ops\._c10d_functional\.(wait_tensor)\."),
    ("collective", r"torch\.ops\._c10d_functional\.(\w+)\."),
    ("kernel", r"(cpp_fused\w*|cpp_CppMicroGemm\w*)$|(\w+)\.run$"),
    ("extern", r"extern_kernels\.(\w+)$"),
    ("other", r"torch\.ops\.aten\.(flatten)\."),  # a view of the same memory
    ("extern", r"torch\.ops\.\w+\.(\w+)"),
    ("allocation", r"(empty_strided\w*)$"),
)


@dataclass(frozen=True)
class ProgramLine:
    """One line of the program.

    Attributes:
        number: counted from ``def call``, which is line 1.
        kind: what it does; views, checks of shapes, reuse of memory and ``return`` are "other".
        name: of the operation: ``all_reduce_``, ``wait_tensor``, ``cpp_fused_1``, ``mm``, ...
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
    """What a name stands for: a stretch of the memory that was allocated under the name ``root``.

    ``offset`` and ``shape`` in elements; ``shape`` and ``dtype`` are None where the program does
    not say.
    """

    name: str
    root: str
    offset: int = 0
    shape: Shape | None = None
    dtype: str | None = None

    @property
    def elements(self) -> int:
        """Their number; -1 where the shape is not known."""
        return -1 if self.shape is None else math.prod(self.shape)


@dataclass
class CollectiveRequest:
    """A collective: what it was handed, which results nobody has waited for, and who waited."""

    line: ProgramLine
    sent: list[BufferView]
    pending: set[str]
    waits: list[ProgramLine] = field(default_factory=list)
    too_early: bool = False
    """Whether a result was used before it was waited for."""

    def is_pending(self, root: str) -> bool:
        """Whether this memory is, or contains, a result that nobody has waited for."""
        return any(result == root or result.startswith(f"{root}[") for result in self.pending)


class InductorProgram:
    """The parsed function.

    Attributes:
        lines: all lines, in order.
        requests: the collectives, in order.
        views: by name; a name never changes its meaning in such a program.
    """

    def __init__(self, code: str):
        self._source = code.splitlines()
        function = _find_call_function(code)
        self.lines: list[ProgramLine] = []
        self.requests: list[CollectiveRequest] = []
        self.views: dict[str, BufferView] = {}
        # of inputs, from the example that each program brings along for a benchmark of itself
        self._dtypes = dict(
            re.findall(r"^\s*(\w+) = rand_strided\(.*dtype=torch\.(\w+)\)", code, re.MULTILINE)
        )
        self._stretches: list[tuple[ProgramLine, BufferView]] = []  # every reinterpret_tensor
        by_line: dict[int, list[ast.stmt]] = {}
        for statement in _flatten_statements(function.body):
            by_line.setdefault(statement.lineno, []).append(statement)
        for lineno, statements in by_line.items():
            self._read_statements(lineno - function.lineno + 1, statements)

    @property
    def all_reduces(self) -> list[CollectiveRequest]:
        """The requests that sum gradients, or whatever else, over ranks: the buckets."""
        return [request for request in self.requests if request.line.name.startswith("all_reduce")]

    def overlap_lines(self, request: CollectiveRequest) -> tuple[ProgramLine, ...]:
        """What runs while a collective travels: kernels and externs before the first wait for
        it.
        """
        return self.compute_between(request.line, request.waits[0] if request.waits else None)

    def compute_between(
        self, first: ProgramLine, last: ProgramLine | None
    ) -> tuple[ProgramLine, ...]:
        """Kernels and externs after one line and before another, or up to the end."""
        end = last.number if last else math.inf
        return tuple(
            line
            for line in self.lines
            if first.number < line.number < end and line.kind in COMPUTE_KINDS
        )

    def bucket_pieces(self, sent: BufferView, request: ProgramLine) -> list[BufferView]:
        """The tensors that were copied into one flat buffer before the request, by place, or the
        tensor itself.

        The all-reduce takes the flat buffer, or one of the same size that a kernel has made of it.
        """
        writers = [
            line
            for line in self.lines
            if line.number < request.number and line.kind in COMPUTE_KINDS
        ]
        writer = next(
            (each for each in reversed(writers) if sent.root in self._memory_roots(each)), None
        )
        sources = [self.views[name] for name in writer.buffers] if writer else []
        for source in [sent, *(each for each in sources if each.elements == sent.elements)]:
            before = [view for line, view in self._stretches if line.number < request.number]
            by_offset = {view.offset: view for view in before if view.root == source.root}
            parts = [by_offset[offset] for offset in sorted(by_offset)]
            if _is_gapless(parts, sent.elements):
                return [
                    self._view_after_wait(
                        replace(sent, offset=part.offset, shape=part.shape), request
                    )
                    for part in parts
                ]
        return [sent]

    def _view_after_wait(self, part: BufferView, request: ProgramLine) -> BufferView:
        """The part in the shape that it has when it is back."""
        place = (part.root, part.offset, part.elements)
        after = [view for line, view in self._stretches if line.number > request.number]
        shapes = [view.shape for view in after if (view.root, view.offset, view.elements) == place]
        return replace(part, shape=shapes[0]) if shapes else part

    def _read_statements(self, number: int, statements: Sequence[ast.stmt]) -> None:
        first = statements[0]
        if (
            isinstance(first, ast.Assign)
            and isinstance(first.value, ast.Name)
            and first.value.id == "args"
        ):
            for given in ast.walk(first.targets[0]):
                if isinstance(given, ast.Name):
                    self.views[given.id] = BufferView(
                        given.id, given.id, dtype=self._dtypes.get(given.id)
                    )
        kind, name = _classify_statement(first)
        self._update_views(first)
        text = " ".join(line.strip() for line in self._source[first.lineno - 1 : first.end_lineno])
        line = ProgramLine(number, kind, name, self._find_buffers(first), text)
        self.lines.append(line)
        self._stretches += [
            (line, self._resolve_view(call)) for call in ast.walk(first) if _is_reinterpret(call)
        ]
        call = _get_call(first)
        if call and kind == "wait":
            self._record_wait(line, call)
        elif kind == "collective" or kind in COMPUTE_KINDS or name == "return":
            self._flag_early_use(line)
        if call and kind == "collective":
            self._add_request(line, call, _assignment_targets(first))

    def _add_request(self, line: ProgramLine, call: ast.Call, targets: list[ast.expr]) -> None:
        given = call.args[0].elts if isinstance(call.args[0], ast.List) else [call.args[0]]
        sent = [self._resolve_view(each) for each in given]
        if line.name.endswith("_"):
            pending = {view.root for view in sent}
        else:
            into = [keyword.value for keyword in call.keywords if keyword.arg == "out"] or targets
            outputs = [
                each
                for value in into
                for each in (value.elts if isinstance(value, ast.List) else [value])
            ]
            pending = {self._resolve_view(output).root for output in outputs}
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
        names = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id in self.views
        ]
        return tuple(
            dict.fromkeys(
                node.id for node in sorted(names, key=lambda node: (node.lineno, node.col_offset))
            )
        )

    def _update_views(self, statement: ast.stmt) -> None:
        """Learn what a line gives a name to, and the shapes that it checks."""
        for target in _assignment_targets(statement):
            if (
                isinstance(target, ast.Name)
                and target.id.startswith("buf")
                and isinstance(statement, ast.Assign)
            ):
                self.views[target.id] = replace(
                    self._resolve_view(statement.value, target.id), name=target.id
                )
        call = _get_call(statement)
        if call and ast.unparse(call.func) == "assert_size_stride":
            seen = self._resolve_view(call.args[0])
            if seen.name in self.views and seen.shape is None:
                self.views[seen.name] = replace(seen, shape=_literal_shape(call.args[1]))

    def _resolve_view(self, value: ast.expr, new: str = "") -> BufferView:
        """What an expression stands for; memory of its own, under the name ``new``, where it is no
        view.
        """
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
            return BufferView(
                new,
                new,
                0,
                _literal_shape(value.args[0]),
                ast.unparse(value.args[2]).removeprefix("torch."),
            )
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
        f"no function call() in {len(code.splitlines())} lines: give the whole program that"
        " inductor wrote"
    )


def _flatten_statements(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those under ``with`` (a GPU's guard) among them."""
    for statement in statements:
        yield from (
            _flatten_statements(statement.body) if isinstance(statement, ast.With) else [statement]
        )


def _get_call(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _is_reinterpret(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor"


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
    """The shape that is written out; None for one with symbols, of a program for any size."""
    try:
        return tuple(ast.literal_eval(value))
    except ValueError:
        return None


def _is_gapless(parts: Sequence[BufferView], elements: int) -> bool:
    """Whether two or more parts fill a buffer of so many elements without gaps."""
    ends = [part.offset + part.elements for part in parts]
    return len(parts) > 1 and [0, *ends] == [*(part.offset for part in parts), elements]
