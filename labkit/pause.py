"""Call functions at the start of a module's forward pass and of its backward pass."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from labkit import torch_private
from labkit.torch_private import tree_leaves, tree_map_only

# What to do at some moment, on the device of the tensors there.
Pause = Callable[[torch.device], None]


class _PauseBackward(torch.autograd.Function):
    """The identity, with a pause in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause) -> Tensor:
        ctx.pause = pause
        # FSDP2 warns about blocks that return a view of their input.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        wait_for_messages(grads)
        ctx.pause(grads[0].device)
        return grads[0], None


# The pauses of compiled programs, whose operators take numbers and not functions.
_compiled_pauses: list[Pause] = []


def has_pauses() -> bool:
    """Tell whether a module of this process pauses, so that a compiled program may do so."""
    return bool(_compiled_pauses)


@cache
def _make_operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return two copies of a tensor for compiled programs: one pauses, one does in its backward."""
    # The compiler keeps operators that it does not know in their places. It demands of them that
    # they return no view of their input.

    @torch.library.custom_op("labkit::pause", mutates_args=())
    def pause(x: Tensor, number: int) -> Tensor:
        _compiled_pauses[number](x.device)
        return x.clone()

    @torch.library.custom_op("labkit::pause_backward", mutates_args=())
    def pause_backward(x: Tensor, number: int) -> Tensor:
        return x.clone()

    def keep_number(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.number = inputs[1]

    # inductor hides communication behind operators whose FLOPs it could count.
    register_flop_formula(torch.ops.labkit.pause)(lambda *_, **__: 0)
    for operator in (pause, pause_backward):
        operator.register_fake(lambda x, number: torch.empty_like(x))
    pause.register_autograd(lambda ctx, grad: (grad, None))
    pause_backward.register_autograd(
        lambda ctx, grad: (pause(grad, ctx.number), None), setup_context=keep_number
    )
    return pause, pause_backward


def pause_once(values: Any, pause: Pause) -> tuple[Any, bool]:
    """Pause in the backward pass of the first tensor with a gradient; tell whether there is one."""
    return _change_first(values, lambda x: _PauseBackward.apply(x, pause))


def _change_first(values: Any, change: Callable[[Tensor], Any]) -> tuple[Any, bool]:
    found = False

    def attach(x: Tensor) -> Tensor:
        nonlocal found
        if found or not x.requires_grad:
            return x
        found = True
        changed: Tensor = change(x)
        return changed

    return tree_map_only(Tensor, attach, values), found


def attach_pause(block: nn.Module, in_forward: Pause, in_backward: Pause) -> None:
    """Call functions at the start of a block's forward pass and of its backward pass."""
    number = len(_compiled_pauses)
    _compiled_pauses.extend([in_forward, in_backward])
    pause, pause_later = _make_operators()

    # Before the block is wrapped: FSDP's hooks then gather its parameters before the pause.
    def pause_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wait_for_messages(tensors)
        in_forward(tensors[0].device)

    def pause_backward(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            # Behind the block's arithmetic, which needs the parameters that a compiler may gather.
            return _change_first(output, lambda x: pause_later(pause(x, number), number + 1))[0]
        return pause_once(output, in_backward)[0]

    block.register_forward_pre_hook(pause_forward, with_kwargs=True)
    block.register_forward_hook(pause_backward)


def wait_for_messages(tensors: Iterable[Tensor]) -> None:
    """Wait for tensors that are still being sent, as the first operation on them would."""
    for each in tensors:
        if isinstance(each, torch_private.AsyncCollectiveTensor):
            each.trigger_wait()
