"""Which operators a program runs on one rank, with their operations and bytes: counted on tensors without content.

    with FakeTensorMode(), OperatorCounter() as counted:
        model(x).sum().backward()
    counted.operators           # [Operator("addmm", flops=4096.0, moved_bytes=1664, dtype="float32"), ...]

No process group and no memory is needed: the model, its input and its optimizer are made under the same FakeTensorMode.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from labkit.theory.steptime import Operator


class OperatorCounter(TorchDispatchMode):
    """Writes down every operator inside.

    Attributes:
        operators: in the order in which they ran.

    Bytes are those of all tensors that an operator reads or writes, as if no cache kept any. A view moves none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and write it down."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "aten":  # torch's own notes, such as a tensor's device
            return result
        packet = func.overloadpacket
        moved = 0 if func.is_view else moved_bytes(func, args, kwargs, result)
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        numbers = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        dtype = str(numbers[0].dtype).removeprefix("torch.") if numbers else "float32"
        self.operators.append(Operator(packet.__name__, flops, moved, dtype))
        return result


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Read: all arguments. Written: results, and arguments that the operator changes in place."""
    schema = func._schema
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs]
    changed = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
    fresh = [value for value, returned in _results(result, schema.returns) if not returned.alias_info]
    return sum(_bytes(value) for value in (args, dict(kwargs), changed, fresh))


def _results(result: Any, returns: list[Any]) -> list[tuple[Any, Any]]:
    if not returns:
        return []
    return list(zip([result] if len(returns) == 1 else result, returns, strict=True))


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(tensors) if isinstance(each, Tensor))
