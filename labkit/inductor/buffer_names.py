"""Find the parameter that each buffer of a program belongs to, from the order of the gradients.

The backward pass of a linear layer has two GEMMs, and both read the gradient of the layer's output:

    mm(gradient of the output, transposed; input) gives the gradient of the weight
    mm(gradient of the output, weight)            gives the gradient of the input
"""

import ast
from collections.abc import Iterable, Iterator, Sequence

from labkit.inductor.program import InductorProgram, ProgramLine

WEIGHT_SUFFIX = ".weight"


def name_linear_buffers(
    program: InductorProgram, gradients: Sequence[str], buckets: Iterable[Iterable[str]]
) -> dict[str, str]:
    """Return names such as ``fc3.weight``, ``fc3.input``, ``fc3.output.grad``, by buffer.

    Args:
        program: the backward pass of linear layers in a row.
        gradients: parameters, in the order in which their gradients are sent.
        buckets: the buffers that are sent, in the same order.
    """
    layers = iter(
        [name.removesuffix(WEIGHT_SUFFIX) for name in gradients if name.endswith(WEIGHT_SUFFIX)]
    )
    found: dict[str, str] = {}
    products = list(_find_gemms(program.lines))
    for left, right, out, transposed in products:
        layer = next(layers, "") if transposed else ""
        if layer:
            found[left] = f"{layer}.output.grad"
            found[right] = f"{layer}.input"
            found[out] = f"{layer}.weight.grad"
    for left, right, out, transposed in products:
        layer = found.get(left, "").removesuffix(".output.grad")
        if not transposed and layer:
            found[right] = f"{layer}.weight"
            # The input of this layer may already be known as the output of the layer below.
            found.setdefault(out, f"{layer}.input.grad")
    travelling = [buffer for bucket in buckets for buffer in bucket]
    for buffer, name in zip(travelling, gradients, strict=True):
        together = travelling.count(buffer)
        found[buffer] = f"{name}.grad" if together == 1 else f"{together} gradients"
    return found


def _find_gemms(lines: Iterable[ProgramLine]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield both factors and the result of each GEMM, and whether the first is transposed."""
    for line in lines:
        if line.name == "mm" and len(line.buffers) == 3:
            calls = [node for node in ast.walk(ast.parse(line.text)) if isinstance(node, ast.Call)]
            (call,) = [node for node in calls if ast.unparse(node.func).endswith(".mm")]
            left, right, out = line.buffers
            yield left, right, out, isinstance(call.args[0], ast.Call)
