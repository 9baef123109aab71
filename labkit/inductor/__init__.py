"""Read the program that inductor writes for a backward pass: its compute, collectives and waits.

torch.compile's backend, inductor, writes a Python function named ``call``. Most of its lines are
one of these, counted from ``def call``, because the C++ above it differs between processors:

     14  extern      mm(buf1, arg7_1, buf3)          a GEMM, by a library
     17  kernel      cpp_fused_1(buf4)               a loop that inductor wrote, in C++ or Triton
     19  collective  all_reduce_(buf4)               starts the all-reduce and returns at once
     23  extern      mm(buf2, arg3_1, buf7)          computes while the gradient is sent
     68  wait        wait_tensor(buf4)               afterwards buf4 may be used

The compute between a collective and its wait hides the communication. A *bucket* is one all-reduce
of one or more gradients. Inductor fuses in one of two ways: ``coalesced`` passes several tensors to
one call, ``concat`` copies them into one flat buffer (torch/_inductor/fx_passes/ddp_fusion.py).
This package only reads text. Text that is not a program of inductor's raises ValueError.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.inductor.listing import KIND_COLOURS, ProgramListing
from labkit.inductor.program import BufferView, InductorProgram, ProgramLine, Shape

__all__ = [
    "KIND_COLOURS", "Bucket", "Gradient", "ProgramLine", "ProgramListing",
    "find_buckets", "missing_waits", "name_buffers", "parse_lines",
]  # fmt: skip
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Gradient:
    """One tensor of an all-reduce."""

    buffer: str  # its name in the program
    shape: Shape  # flat if the program never gives it another shape
    dtype: str  # as torch names it, such as ``float32``
    bytes: int  # what this rank hands in
    name: str = ""  # of the parameter, if the caller knows it; the program does not


@dataclass(frozen=True)
class Bucket:
    """Gradients that share one all-reduce, the ``index``-th of the program, from 0."""

    index: int
    gradients: tuple[Gradient, ...]  # in the order in which they are handed in
    request: ProgramLine  # starts the all-reduce
    waits: tuple[ProgramLine, ...]  # wait for it, if any do
    hidden_by: tuple[ProgramLine, ...]  # kernels and externs between the request and the first wait

    @property
    def bytes(self) -> int:
        """What this rank hands in."""
        return sum(gradient.bytes for gradient in self.gradients)


def parse_lines(code: str) -> list[ProgramLine]:
    """Return the lines of ``call`` in order, without comments."""
    return InductorProgram(code).lines


def find_buckets(code: str) -> list[Bucket]:
    """Return every all-reduce of the program, in order."""
    program, found = InductorProgram(code), []
    for index, request in enumerate(program.all_reduces):
        # Inductor may have copied several gradients into one of the tensors that are sent.
        pieces = [piece for sent in request.sent for piece in program.bucket_pieces(sent, request)]
        gradients = tuple(_make_gradient(piece, request.line) for piece in pieces)
        hidden_by, waits = program.overlap_lines(request), tuple(request.waits)
        found.append(Bucket(index, gradients, request.line, waits, hidden_by))
    return found


def _make_gradient(piece: BufferView, request: ProgramLine) -> Gradient:
    if piece.shape is None or piece.dtype not in ITEM_BYTES:
        raise ValueError(
            f"line {request.number} sends {piece.name} of shape {piece.shape} and dtype"
            f" {piece.dtype}: compile with dynamic=False, and take {', '.join(ITEM_BYTES)}"
        )
    return Gradient(piece.name, piece.shape, piece.dtype, piece.elements * ITEM_BYTES[piece.dtype])


def name_buffers(code: str, gradients: Sequence[str]) -> dict[str, str]:
    """Return what the buffers hold, such as ``fc3.input`` or ``fc3.output.grad``, as far as known.

    The code is a backward pass of linear layers in a row; ``gradients`` are the parameters, in the
    order in which their gradients are sent. Both GEMMs of a layer read its output's gradient:

        mm(gradient of the output, transposed; input) gives the gradient of the weight
        mm(gradient of the output, weight)            gives the gradient of the input
    """
    sent = [gradient.buffer for bucket in find_buckets(code) for gradient in bucket.gradients]
    if len(sent) != len(gradients):
        named = f"{len(gradients)} are named"
        raise ValueError(f"{len(sent)} gradients travel in the program, and {named}")
    layers = iter([name.removesuffix(".weight") for name in gradients if name.endswith(".weight")])
    products = [line for line in parse_lines(code) if line.name == "mm" and len(line.buffers) == 3]
    # A transposed factor is a view: mm(reinterpret_tensor(buf2, ...), arg6_1, out=buf8).
    transposed = [line for line in products if ".mm(reinterpret_tensor(" in line.text]
    names: dict[str, str] = {}
    # The gradients of weights come first: they tell which layer an output's gradient belongs to.
    for line, layer in zip(transposed, layers, strict=False):
        held = (f"{layer}.output.grad", f"{layer}.input", f"{layer}.weight.grad")
        names |= dict(zip(line.buffers, held, strict=True))
    for line in products:
        left, right, out = line.buffers
        layer = names.get(left, "").removesuffix(".output.grad")
        if line not in transposed and layer:
            names[right] = f"{layer}.weight"
            # The input of this layer may already be known as the output of the layer below.
            names.setdefault(out, f"{layer}.input.grad")
    for buffer, name in zip(sent, gradients, strict=True):
        together = sent.count(buffer)
        names[buffer] = f"{name}.grad" if together == 1 else f"{together} gradients"
    return names


def missing_waits(code: str) -> list[ProgramLine]:
    """Return the collectives whose result is used before a wait, or that no line waits for."""
    requests = InductorProgram(code).requests
    return [request.line for request in requests if request.too_early or request.pending]
