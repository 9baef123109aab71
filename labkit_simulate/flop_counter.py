"""Count the operators of a program on one rank, with FLOPs and bytes, on fake tensors.

    with FakeTensorMode(), OperatorCounter() as counter:
        model(x).sum().backward()
    counter.operators           # [Operator("addmm", flops=4096.0, moved_bytes=1664,
    dtype="float32"), ...]

It needs neither process group nor memory. Create model, input and optimizer under the same mode.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.torch_private import TorchDispatchMode, tree_leaves
from labkit_simulate.theory.step_time import Operator

NON_COMPUTE_NAMESPACES = ("prim", "profiler")
"""Namespaces of what computes nothing: a tensor's device, a range of the profiler."""
ZERO_TRAFFIC_OPS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "_unsafe_view",
}
SELECTION_OPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
"""They read as much as they write, however large what they choose from."""
OVERWRITE_OPS = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "_foreach_copy_",
    "_foreach_zero_",
}
"""What they change they do not read."""
CPU_ATTENTION_OP = "_scaled_dot_product_flash_attention_for_cpu"


class OperatorCounter(TorchDispatchMode):
    """Record every operator.

    Attributes:
        operators: in the order in which they ran.
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
        """Run the operator and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in NON_COMPUTE_NAMESPACES:
            self.operators.append(make_operator(func, args, kwargs, result))
        return result


def make_operator(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Operator:
    """Return the FLOPs and bytes of an operator call.

    Bytes are those of all tensors read or written, without caches; a view moves none. Causal
    attention computes half.
    """
    given = bind_arguments(func, args, kwargs)
    flops = operator_flops(func, args, kwargs, result)
    if any(argument.name == "is_causal" and value for argument, value in given):
        flops /= 2
    moved = operator_memory_bytes(func, given, result)
    numbers = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
    dtype = str(numbers[0].dtype).removeprefix("torch.") if numbers else "float32"
    name = func.overloadpacket.__name__
    if name.startswith("convolution") and dtype == "float32":
        dtype = "tf32"  # torch's default for cuDNN, unlike that for matrix products
    return Operator(name, flops, moved, dtype)


def operator_flops(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> float:
    """Return the FLOPs of matrix products and full attention; 0 for other operators."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if name == CPU_ATTENTION_OP:
        return float(sdpa_flop_count(*(each.shape for each in args[:3])))
    if name == f"{CPU_ATTENTION_OP}_backward":
        return float(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    return 0.0


def operator_model_flops(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> float:
    """Return model FLOPs: the backward pass of attention is twice its forward pass, without
    recompute.
    """
    flops = operator_flops(func, args, kwargs, result)
    name = func.overloadpacket.__name__
    return flops * 4 / 5 if "attention" in name and name.endswith("_backward") else flops


def bind_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return the given arguments of an operator by schema argument."""
    arguments = func._schema.arguments
    return [
        *zip(arguments, args, strict=False),
        *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
    ]


def operator_memory_bytes(func: Any, given: list[tuple[Any, Any]], result: Any) -> int:
    """Return bytes read (arguments that are not only written) and written (results, changed
    arguments).
    """
    name = func.overloadpacket.__name__
    if func.is_view or name in ZERO_TRAFFIC_OPS:
        return 0
    fresh = [
        value
        for value, returned in _match_returns(result, func._schema.returns)
        if not returned.alias_info
    ]
    if name in SELECTION_OPS:
        return 2 * _tensor_bytes(fresh)
    # FSDP2's own operator copies a rank's shards to their place among those of all ranks.
    if name == "all_gather_copy_in":
        return 2 * _tensor_bytes(given[0][1])
    changed = [
        (argument, value)
        for argument, value in given
        if argument.alias_info and argument.alias_info.is_write
    ]
    unread = [value for argument, value in changed if argument.is_out or name in OVERWRITE_OPS]
    written = [value for _, value in changed]
    return (
        _tensor_bytes([value for _, value in given])
        - _tensor_bytes(unread)
        + _tensor_bytes(written)
        + _tensor_bytes(fresh)
    )


def _match_returns(result: Any, returns: list[Any]) -> list[tuple[Any, Any]]:
    if not returns:
        return []
    return list(zip([result] if len(returns) == 1 else result, returns, strict=True))


def _tensor_bytes(tensors: Any) -> int:
    return sum(
        each.numel() * each.element_size()
        for each in tree_leaves(tensors)
        if isinstance(each, Tensor)
    )
