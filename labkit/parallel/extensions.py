"""FSDP2 with an all-gather extension: every parameter decides what its units send."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from labkit import tensors

ExtensionChoice = str | tensors.Extension | Callable[[Tensor], Tensor]
"""How parameters are gathered: "none" (FSDP2's default), "two_tensor", a key of EXTENSIONS, an
Extension, or a function that converts each parameter to a tensor type with hooks.
"""


def apply_extension(
    model: nn.Sequential,  # on the meta device, call add_extension_hooks after to_empty
    # On one rank FSDP2 copies the first of the sent tensors and drops the others (torch 2.13).
    mesh: DeviceMesh,
    extension: ExtensionChoice,
    *,
    reshard_after_forward: bool = True,
    **policies: Any,  # for fully_shard
) -> nn.Sequential:
    """Shard a model, one unit per child, and gather its parameters with an extension."""
    # Before fully_shard, which asks a parameter's type for hooks.
    convert = tensors.make_two_tensor if extension == "two_tensor" else extension
    if callable(convert):
        tensors.convert_parameters(model, convert)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    for child in model:
        if list(child.parameters()):
            fully_shard(child, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
    fully_shard(model, mesh=mesh, **policies)
    if not on_meta:
        add_extension_hooks(model, extension)
    return model


def add_extension_hooks(model: nn.Module, extension: ExtensionChoice) -> None:
    """Add an extension's hooks to a sharded model's parameters; a ``TwoTensor``'s type has them."""
    if not callable(extension) and extension not in ("none", "two_tensor"):
        tensors.extend_model(model, extension)
