"""Which parameter a buffer of the program belongs to. The program does not say; the order of the
gradients does.

The backward pass of a linear layer has two products of matrices, and both read the gradient of the
layer's output:

    mm(gradient of the output, transposed; input) gives the gradient of the weight
    mm(gradient of the output, weight)            gives the gradient of the layer's input
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from labkit.inductor.program import InductorProgram, ProgramLine

WEIGHT_SUFFIX = ".weight"


def name_linear_buffers(
    program: InductorProgram, gradients: Sequence[str], buckets: Iterable[Iterable[str]]
) -> dict[str, str]:
    """Names such as ``fc3.weight``, ``fc3.input``, ``fc3.output.grad`` by buffer, for linear layers
    in a row.

    Args:
        program: of their backward pass.
        gradients: the parameters in the order in which their gradients travel.
        buckets: the buffers that travel, likewise.
    """
    layers = iter(
        [name.removesuffix(WEIGHT_SUFFIX) for name in gradients if name.endswith(WEIGHT_SUFFIX)]
    )
    found: dict[str, str] = {}
    products = list(_find_gemms(program.lines))
    for left, right, out, transposed in products:
        layer = next(layers, "") if transposed else ""
        if layer:
            found |= {
                left: f"{layer}.output.grad",
                right: f"{layer}.input",
                out: f"{layer}.weight.grad",
            }
    for left, right, out, transposed in products:
        layer = found.get(left, "").removesuffix(".output.grad")
        if not transposed and layer:
            found |= {right: f"{layer}.weight", out: found.get(out, f"{layer}.input.grad")}
    travelling = [buffer for bucket in buckets for buffer in bucket]
    for buffer, name in zip(travelling, gradients, strict=True):
        together = travelling.count(buffer)
        found[buffer] = f"{name}.grad" if together == 1 else f"{together} gradients"
    return found


def _find_gemms(lines: Iterable[ProgramLine]) -> Iterator[tuple[str, str, str, bool]]:
    """The two factors and the result of each product of matrices, and whether the first is
    transposed.
    """
    for line in lines:
        if line.name == "mm" and len(line.buffers) == 3:
            (call,) = [node for node in ast.walk(ast.parse(line.text)) if _is_mm(node)]
            left, right, out = line.buffers
            yield left, right, out, isinstance(call.args[0], ast.Call)


def _is_mm(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".mm")
