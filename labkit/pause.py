"""Call functions at the start of a module's forward pass and of its backward pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

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


def pause_once(values: Any, pause: Pause) -> tuple[Any, bool]:
    """Pause in the backward pass of the first tensor with a gradient; tell whether there is one."""
    found = False

    def attach(x: Tensor) -> Tensor:
        nonlocal found
        if found or not x.requires_grad:
            return x
        found = True
        delayed: Tensor = _PauseBackward.apply(x, pause)
        return delayed

    return tree_map_only(Tensor, attach, values), found


def attach_pause(block: nn.Module, in_forward: Pause, in_backward: Pause) -> None:
    """Call functions at the start of a block's forward pass and of its backward pass."""

    # Before the block is wrapped: FSDP's hooks then gather its parameters before the pause.
    def pause_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wait_for_messages(tensors)
        in_forward(tensors[0].device)

    def pause_backward(module: nn.Module, args: Any, output: Any) -> Any:
        return pause_once(output, in_backward)[0]

    block.register_forward_pre_hook(pause_forward, with_kwargs=True)
    block.register_forward_hook(pause_backward)


def wait_for_messages(tensors: Iterable[Tensor]) -> None:
    """Wait for tensors that are still being sent, as the first operation on them would."""
    for each in tensors:
        if isinstance(each, torch_private.AsyncCollectiveTensor):
            each.trigger_wait()
