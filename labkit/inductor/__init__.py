"""Read the program that the compiler writes for a backward pass: what it computes, what it sends,
when it waits.

torch.compile ends in inductor, which writes a Python function named ``call``. Most of its lines are
one of these:

     14  extern      mm(buf1, arg7_1, buf3)          a product of matrices, by a library
     17  kernel      cpp_fused_1(buf4)               a loop that inductor wrote, in C++ or Triton
     19  collective  all_reduce_(buf4)               asked for: the line returns at once
     23  extern      mm(buf2, arg3_1, buf7)          computes while the gradient travels
     68  wait        wait_tensor(buf4)               from here on buf4 may be used

What stands between a request and its wait hides the communication. A *bucket* is one all-reduce of
one or more gradients. Inductor fuses in one of two ways: ``coalesced`` names several tensors in one
call, ``concat`` copies them into one flat buffer (torch/_inductor/fx_passes/ddp_fusion.py). Lines
are counted from ``def call``, since the C++ above it differs from processor to processor.
Everything here reads text; nothing is run.
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
    """One tensor that travels.

    Attributes:
        buffer: where it lies in the program.
        shape: flat where the program never gives it another shape.
        dtype: as torch names it, without ``torch.``: ``float32``.
        bytes: what this rank hands in.
        name: of the parameter, for who knows it; the program does not.
    """

    buffer: str
    shape: Shape
    dtype: str
    bytes: int
    name: str = ""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel in one all-reduce.

    Attributes:
        index: from 0, in the order of the requests.
        gradients: in the order in which they are handed in.
        request: the line that asks for the all-reduce.
        waits: the lines that wait for it; none where it is never waited for.
        hidden_by: kernels and externs between the request and the first wait: they run while the
            bucket travels.
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
    """The lines of ``call``, in order, comments left out.

    Raises:
        ValueError: the text is no program of inductor's.
    """
    return InductorProgram(code).lines


def find_buckets(code: str) -> list[Bucket]:
    """Every all-reduce of the program, in the order of the requests.

    Raises:
        ValueError: as ``read``; or the program does not say how large a tensor is that travels.
    """
    program = InductorProgram(code)
    found = []
    for index, request in enumerate(program.all_reduces):
        pieces = [
            piece for sent in request.sent for piece in program.bucket_pieces(sent, request.line)
        ]
        gradients = tuple(_make_gradient(piece, request.line) for piece in pieces)
        found.append(
            Bucket(
                index, gradients, request.line, tuple(request.waits), program.overlap_lines(request)
            )
        )
    return found


def name_buffers(code: str, gradients: Sequence[str]) -> dict[str, str]:
    """What buffers and inputs of the program hold, such as ``fc3.weight`` and ``fc3.weight.grad``,
    as far as is known.

    Args:
        code: a backward pass of linear layers in a row.
        gradients: parameters, in the order in which their gradients travel.

    Raises:
        ValueError: as ``buckets``; or another number of gradients travels.
    """
    travelling = [
        [gradient.buffer for gradient in bucket.gradients] for bucket in find_buckets(code)
    ]
    if sum(map(len, travelling)) != len(gradients):
        raise ValueError(
            f"{sum(map(len, travelling))} gradients travel in the program, and {len(gradients)} are"
            " named"
        )
    return name_linear_buffers(InductorProgram(code), gradients, travelling)


def missing_waits(code: str) -> list[ProgramLine]:
    """The collectives with a result that is used or returned before it was waited for, or never
    waited for.

    Raises:
        ValueError: as ``read``.
    """
    return [
        request.line
        for request in InductorProgram(code).requests
        if request.too_early or request.pending
    ]


def _make_gradient(piece: BufferView, request: ProgramLine) -> Gradient:
    if piece.shape is None or piece.dtype not in ITEM_BYTES:
        raise ValueError(
            f"line {request.number} sends {piece.name} of shape {piece.shape} and dtype"
            f" {piece.dtype}: shapes must be numbers (compile with dynamic=False) and dtypes among"
            f" {', '.join(ITEM_BYTES)}"
        )
    return Gradient(piece.name, piece.shape, piece.dtype, piece.elements * ITEM_BYTES[piece.dtype])
