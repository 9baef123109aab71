"""Read the program that inductor writes for a backward pass: its compute, collectives and waits.

torch.compile's backend, inductor, writes a Python function named ``call``. Most of its lines are
one of these:

     14  extern      mm(buf1, arg7_1, buf3)          a GEMM, by a library
     17  kernel      cpp_fused_1(buf4)               a loop that inductor wrote, in C++ or Triton
     19  collective  all_reduce_(buf4)               starts the all-reduce and returns at once
     23  extern      mm(buf2, arg3_1, buf7)          computes while the gradient is sent
     68  wait        wait_tensor(buf4)               afterwards buf4 may be used

The compute between a collective and its wait hides the communication. A *bucket* is one all-reduce
of one or more gradients. Inductor fuses in one of two ways: ``coalesced`` passes several tensors to
one call, ``concat`` copies them into one flat buffer (torch/_inductor/fx_passes/ddp_fusion.py).
Lines are counted from ``def call``, because the C++ above it differs between processors. This
package only reads text and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.inductor.buffer_names import name_linear_buffers
from labkit.inductor.listing import KIND_COLOURS, ProgramListing
from labkit.inductor.program import BufferView, InductorProgram, ProgramLine, Shape

__all__ = [
    "KIND_COLOURS",
    "Bucket",
    "Gradient",
    "ProgramLine",
    "ProgramListing",
    "find_buckets",
    "missing_waits",
    "name_buffers",
    "parse_lines",
]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Gradient:
    """One tensor of an all-reduce.

    Attributes:
        buffer: its name in the program.
        shape: flat if the program never gives it another shape.
        dtype: as torch names it, such as ``float32``.
        bytes: what this rank hands in.
        name: of the parameter, if the caller knows it; the program does not.
    """

    buffer: str
    shape: Shape
    dtype: str
    bytes: int
    name: str = ""


@dataclass(frozen=True)
class Bucket:
    """Gradients that share one all-reduce.

    Attributes:
        index: from 0, in the order of the all-reduces.
        gradients: in the order in which they are handed in.
        request: the line that starts the all-reduce.
        waits: the lines that wait for it, if any.
        hidden_by: kernels and externs between the request and the first wait.
    """

    index: int
    gradients: tuple[Gradient, ...]
    request: ProgramLine
    waits: tuple[ProgramLine, ...]
    hidden_by: tuple[ProgramLine, ...]

    @property
    def bytes(self) -> int:
        """What this rank hands in."""
        return sum(gradient.bytes for gradient in self.gradients)


def parse_lines(code: str) -> list[ProgramLine]:
    """Return the lines of ``call`` in order, without comments.

    Raises:
        ValueError: the text is not a program of inductor's.
    """
    return InductorProgram(code).lines


def find_buckets(code: str) -> list[Bucket]:
    """Return every all-reduce of the program, in order.

    Raises:
        ValueError: the text is not a program of inductor's, or does not give the size of a tensor
            that is sent.
    """
    program = InductorProgram(code)
    found = []
    for index, request in enumerate(program.all_reduces):
        gradients: list[Gradient] = []
        for sent in request.sent:
            pieces = program.bucket_pieces(sent, request.line)
            gradients += [_make_gradient(piece, request.line) for piece in pieces]
        hidden_by, waits = program.overlap_lines(request), tuple(request.waits)
        found.append(Bucket(index, tuple(gradients), request.line, waits, hidden_by))
    return found


def name_buffers(code: str, gradients: Sequence[str]) -> dict[str, str]:
    """Return what the program's buffers hold, such as ``fc3.weight``, as far as it can be told.

    Args:
        code: a backward pass of linear layers in a row.
        gradients: parameters, in the order in which their gradients are sent.

    Raises:
        ValueError: as ``find_buckets``, or the program sends another number of gradients.
    """
    travelling = [
        [gradient.buffer for gradient in bucket.gradients] for bucket in find_buckets(code)
    ]
    count = sum(map(len, travelling))
    if count != len(gradients):
        raise ValueError(f"{count} gradients travel in the program, and {len(gradients)} are named")
    return name_linear_buffers(InductorProgram(code), gradients, travelling)


def missing_waits(code: str) -> list[ProgramLine]:
    """Return the collectives whose result is used, or returned, before a wait, or never waited for.

    Raises:
        ValueError: the text is not a program of inductor's.
    """
    requests = InductorProgram(code).requests
    return [request.line for request in requests if request.too_early or request.pending]


def _make_gradient(piece: BufferView, request: ProgramLine) -> Gradient:
    if piece.shape is None or piece.dtype not in ITEM_BYTES:
        raise ValueError(
            f"line {request.number} sends {piece.name} of shape {piece.shape} "
            f"and dtype {piece.dtype}: shapes must be numbers (compile with dynamic=False) "
            f"and dtypes among {', '.join(ITEM_BYTES)}"
        )
    return Gradient(piece.name, piece.shape, piece.dtype, piece.elements * ITEM_BYTES[piece.dtype])
