"""Gather parameters in fewer bytes: hooks on the plain local tensors of an FSDP2 model.

FSDP2 looks for its two hooks on the local tensor of each sharded parameter, of whatever type it is. So they can be put
onto a plain one: ``encode`` turns this rank's rows into what is sent, ``decode`` turns what arrived into the parameter.

    rows in float32  --encode-->  numbers, scales  --all-gather-->  all numbers, all scales  --decode-->  parameter

The optimizer updates the float32 rows, so only what computes is rounded. Gradients are reduced as ever.

Shapes: P rows on every rank once padded, W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from labkit.tensors.two_tensor import pad_rows, refill

FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8, _LARGEST_INT8 = torch.finfo(FLOAT8).max, 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a shard of zeros


@dataclass(frozen=True)
class Extension:
    """How a parameter crosses the wire.

    Attributes:
        sends: what each sent tensor is; ``encode`` gives as many.
        encode: from a shard [P, ...] to the tensors that are sent. Each grows W times along its first dimension.
        decode: from all that was gathered, and a dtype, to the parameter [W * P, ...] in that dtype.
    """

    sends: tuple[str, ...]
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[Sequence[Tensor], torch.dtype], Tensor]


def extend(parameter: Tensor, extension: str | Extension) -> None:
    """Let FSDP2 gather a sharded parameter in this way. Call it on every rank, before the first forward pass.

    Shards of unequal length are padded with zeros before they are encoded. The padding ends up below the parameter's
    last row: FSDP2 lays a view of the parameter's own shape over what ``decode`` returns.

    Whatever replaces the local tensor later loses the hooks without a word: moving the model, ``to_empty``,
    ``load_state_dict(assign=True)``. So does CPU offload in every all-gather.

    Args:
        parameter: of two or more dims, sharded along the first by ``fully_shard``, not on the meta device.
        extension: a key of ``EXTENSIONS``, or one's own.

    Raises:
        ValueError: the extension is none, or the parameter is not such a one.
    """
    chosen = EXTENSIONS.get(extension) if isinstance(extension, str) else extension
    if chosen is None:
        raise ValueError(f"extension {extension!r} is none of {', '.join(EXTENSIONS)}")
    rows = _padded_rows(parameter)
    # what FSDP2 asks for hooks: ``to_local`` of a parameter gives a view of it, another object (2.13)
    local: Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    hooks = _Hooks(chosen, local, torch.Size([rows, *parameter.shape[1:]]))
    local.fsdp_pre_all_gather = hooks.pre_all_gather  # type: ignore[attr-defined]
    local.fsdp_post_all_gather = hooks.post_all_gather  # type: ignore[attr-defined]


def extend_all(model: nn.Module, extension: str | Extension) -> int:
    """``extend`` every parameter of two or more dims, and return how many. Call it before the first forward pass.

    And after ``fully_shard`` and, if the model was built on the meta device, ``to_empty``. Vectors stay as they are:
    they are few, and a scale for each row would send more than it saves.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    for parameter in matrices:
        extend(parameter, extension)
    return len(matrices)


class _Hooks:
    """FSDP2's two questions about one parameter, answered with an Extension and checked."""

    def __init__(self, extension: Extension, local: Tensor, padded: torch.Size):
        self.extension, self.local, self.padded = extension, local, padded

    # (mesh) and not the five arguments: told more, FSDP2 refuses on a shorter last shard what is not of the padded
    # shape, and scales are not. The padding itself is known here without them.
    def pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        sent = self.extension.encode(pad_rows(self.local, self.padded[0]))
        names = self.extension.sends
        if len(sent) != len(names):
            raise ValueError(f"encode gave {len(sent)} tensors to send, not {len(names)}: {', '.join(names)}")
        self._ranks = mesh.size()
        return tuple(tensor.contiguous() for tensor in sent), None

    def post_all_gather(
        self, gathered: Sequence[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        whole = self.extension.decode(gathered, param_dtype)
        self._check(whole, param_dtype)
        shared = _storage(whole) in {_storage(tensor) for tensor in gathered}
        if out is None:
            # FSDP2 frees the gathered tensors itself, and sizes the storage of what else is named by its elements
            return whole, () if shared else (whole,)
        if _storage(whole) != _storage(out):
            refill(out, whole)
        return None

    def _check(self, whole: Tensor, dtype: torch.dtype) -> None:
        wanted = (self.padded[0] * self._ranks, *self.padded[1:])
        if tuple(whole.shape) != wanted or whole.dtype != dtype or not whole.is_contiguous():
            raise ValueError(
                f"decode gave {tuple(whole.shape)} in {whole.dtype}, not the contiguous parameter of {self._ranks} "
                f"ranks, {wanted} in {dtype}: undo what encode did to a shard {tuple(self.padded)}"
            )
        if whole.untyped_storage().nbytes() != whole.nbytes:
            raise ValueError("decode gave a view of a larger tensor, which cannot be freed by itself: clone it")


def _padded_rows(parameter: Tensor) -> int:
    """P of a parameter that can be extended."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        raise ValueError(f"a parameter of shape {shape} is not sharded along dim 0: call fully_shard first")
    if parameter.ndim < 2:
        raise ValueError(f"a vector of shape {shape} has no rows to scale: leave it as it is")
    if parameter.is_meta:
        raise ValueError(f"a parameter of shape {shape} is on the meta device: call to_empty first")
    return -(-shape[0] // parameter.device_mesh.size())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _scaled(shard: Tensor, largest: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """A shard over its scale, so that nothing exceeds the limit, and the scale."""
    scale = (largest.float() / limit).clamp(min=_SMALLEST_SCALE)
    return shard / scale, scale


def _encode_float8(shard: Tensor) -> tuple[Tensor, ...]:
    numbers, scale = _scaled(shard, shard.abs().max(), _LARGEST_FLOAT8)
    return numbers.to(FLOAT8), scale.reshape(1)


def _encode_int8(shard: Tensor) -> tuple[Tensor, ...]:
    largest = shard.abs().flatten(1).amax(dim=1).view(-1, *[1] * (shard.ndim - 1))
    numbers, scales = _scaled(shard, largest, _LARGEST_INT8)
    return numbers.round().to(torch.int8), scales


def _decode_float8(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    numbers, scales = gathered  # [W * P, ...], [W]
    by_rank = numbers.float().unflatten(0, (len(scales), -1))
    return (by_rank * scales.view(-1, *[1] * numbers.ndim)).flatten(0, 1).to(dtype)


def _decode_int8(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    numbers, scales = gathered  # [W * P, ...], [W * P, 1, ...]
    return (numbers.float() * scales).to(dtype)


def _decode_plain(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return gathered[0].to(dtype)  # where it has the dtype already, the gathered memory itself


EXTENSIONS: dict[str, Extension] = {
    "fp32": Extension(("numbers",), lambda shard: (shard.float(),), _decode_plain),
    "bf16": Extension(("numbers",), lambda shard: (shard.bfloat16(),), _decode_plain),
    # gloo does not know float8: FSDP2 sends it as plain bytes because a tensor of another dtype goes along
    "float8": Extension(("numbers", "one scale a shard"), _encode_float8, _decode_float8),
    "int8": Extension(("numbers", "one scale a row"), _encode_int8, _decode_int8),
}
