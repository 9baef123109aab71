"""Gather parameters in fewer bytes: hooks on the plain local tensors of an FSDP2 model.

FSDP2 looks for its two hooks on the local tensor of each sharded parameter, whatever its type. So a
plain tensor can have them too. The optimizer updates the float32 rows, so rounding only affects
computation:

    float32 rows --encode--> (values, scales) --all-gather--> all of them --decode--> parameter

Shapes: P rows on every rank after padding, W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from labkit.tensors.two_tensor import pad_rows, refill

FLOAT8 = torch.float8_e4m3fn
GROUP_SIZE = 32
"""Elements of a row that share a scale in a group."""
SHARES = ("shard", "row", "group")
# The largest value of each format, and what shares a scale by default.
_FORMATS: dict[str, tuple[float, str]] = {
    "float8": (torch.finfo(FLOAT8).max, "shard"),
    "int8": (127, "row"),
    "int4": (7, "row"),
}


# From a shard [P, ...] to the tensors to send, each W times longer once it is gathered.
Encode = Callable[[Tensor], tuple[Tensor, ...]]
# From all gathered tensors and a dtype to the parameter [W * P, ...] in that dtype.
Decode = Callable[[Sequence[Tensor], torch.dtype], Tensor]


@dataclass(frozen=True)
class Extension:
    """How a parameter is sent: in tensors, which ``sends`` names."""

    sends: tuple[str, ...]
    encode: Encode
    decode: Decode


def extend_model(model: nn.Module, extension: str | Extension) -> int:
    """Extend every parameter of two or more dims, and return how many.

    Call it after ``fully_shard`` and ``to_empty``, and before the first forward pass.
    """
    # Vectors are small, and a scale per row would send more than it saves.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    for parameter in matrices:
        extend_parameter(parameter, extension)
    return len(matrices)


def extend_parameter(parameter: Tensor, extension: str | Extension) -> None:
    """Let FSDP2 gather a matrix with an Extension, or a key of EXTENSIONS, on every rank.

    Shorter shards are padded with zeros before they are encoded; FSDP2 cuts the padding off. What
    replaces the local tensor drops the hooks silently: moving the model, ``to_empty``,
    ``load_state_dict(assign=True)``, and CPU offload in every all-gather.
    """
    chosen = EXTENSIONS.get(extension) if isinstance(extension, str) else extension
    if chosen is None:
        raise ValueError(f"extension {extension!r} is none of {', '.join(EXTENSIONS)}")
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        rule = f"a parameter of {shape} is not sharded along dim 0"
        raise ValueError(f"{rule}: call fully_shard first")
    if parameter.ndim < 2:
        raise ValueError(f"a vector of shape {shape} has no rows to scale: leave it as it is")
    if parameter.is_meta:
        raise ValueError(f"a parameter of shape {shape} is on the meta device: call to_empty first")
    # FSDP2 looks for hooks on this object; ``to_local`` would return a view of it (2.13).
    local, ranks = parameter._local_tensor, parameter.device_mesh.size()
    # FSDP2 cuts like torch.chunk, so no rank has more rows.
    rows = -(-shape[0] // ranks)
    add_codec_hooks(local, rows, *_checked_codec(chosen, (rows * ranks, *shape[1:])))


def hook_shards(model: nn.Module, add_hooks: Callable[[Tensor, int], None]) -> None:
    """Call ``add_hooks(shard, rows)`` for each parameter of a model that ``fully_shard`` sharded.

    The shard is the object that FSDP2 asks for hooks, and ``rows`` are those of the rank that holds
    most: every rank has to send as many.
    """
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        add_hooks(parameter._local_tensor, -(-len(parameter) // parameter.device_mesh.size()))


def add_codec_hooks(shard: Tensor, rows: int, encode: Encode, decode: Decode) -> None:
    """Put FSDP2's two hooks onto a plain shard, of which every rank sends this many rows."""

    # With the signature (mesh) FSDP2 accepts tensors of any shape. With all five arguments it wants
    # the padded shape on a shorter last shard, which scales do not have.
    def pre_all_gather(mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return tuple(tensor.contiguous() for tensor in encode(pad_rows(shard, rows))), None

    def post_all_gather(
        gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        whole = decode(gathered, dtype)
        if out is None:
            # FSDP2 frees the gathered tensors itself. Naming them here as well would be wrong: it
            # computes the memory of named tensors from their number of elements.
            shared = any(_share_memory(whole, tensor) for tensor in gathered)
            return whole, () if shared else (whole,)
        if not _share_memory(whole, out):
            refill(out, whole)
        return None

    hooked: Any = shard
    hooked.fsdp_pre_all_gather, hooked.fsdp_post_all_gather = pre_all_gather, post_all_gather


def _checked_codec(extension: Extension, shape: tuple[int, ...]) -> tuple[Encode, Decode]:
    """Return an extension's functions, which check their results; ``shape`` includes padding."""

    def encode(shard: Tensor) -> tuple[Tensor, ...]:
        sent, names = extension.encode(shard), extension.sends
        if len(sent) != len(names):
            wanted = f"{len(names)}: {', '.join(names)}"
            raise ValueError(f"encode gave {len(sent)} tensors to send, not {wanted}")
        return sent

    def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        whole = extension.decode(gathered, dtype)
        _check_decoded(whole, shape, dtype)
        return whole

    return encode, decode


def _check_decoded(whole: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = tuple(whole.shape)
    if given != shape or whole.dtype != dtype or not whole.is_contiguous():
        raise ValueError(
            f"decode gave {given} in {whole.dtype}, not the contiguous parameter of all ranks,"
            f" {shape} in {dtype}: undo what encode did to a shard"
        )
    if whole.untyped_storage().nbytes() != whole.nbytes:
        raise ValueError("decode gave a view of a larger tensor, which cannot be freed: clone it")


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def make_quantised_extension(numbers: str, scales: str = "") -> Extension:
    """Send ``numbers`` (float8, int8 or int4), and the scales by which they were divided.

    A "shard", each "row", or each "group" of 32 elements of a row has a scale of its own. Two int4
    numbers share a byte, so rows must have an even length.
    """
    if numbers not in _FORMATS:
        raise ValueError(f"{numbers} has no scales: take {', '.join(_FORMATS)}")
    if scales not in ("", *SHARES):
        raise ValueError(f"scales {scales!r} is none of {', '.join(SHARES)}")
    most, default = _FORMATS[numbers]
    share = scales or default

    def encode(shard: Tensor) -> tuple[Tensor, Tensor]:
        groups = _group_elements(shard, share, shards=1)
        largest = groups.abs().amax(dim=-1, keepdim=True).float()
        # A shard of zeros must not divide by 0.
        chosen = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = _ungroup_elements(groups / chosen, shard.shape)
        if numbers == "int4":
            return _pack_int4(scaled), chosen
        if numbers == "int8":
            return scaled.round().to(torch.int8), chosen
        # Gloo lacks this dtype, but next to a tensor of another dtype FSDP2 sends plain bytes.
        return scaled.to(FLOAT8), chosen

    def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        sent, chosen = gathered
        whole = _unpack_int4(sent) if numbers == "int4" else sent.float()
        groups = _group_elements(whole, share, shards=len(chosen))
        return _ungroup_elements(groups * chosen, whole.shape).to(dtype)

    return Extension(("numbers", f"one scale a {share}"), encode, decode)


def _group_elements(rows: Tensor, share: str, shards: int) -> Tensor:
    """Return [..., elements that share a scale] of rows [R, ...] from this number of shards."""
    # [R, columns]
    flat = rows.flatten(1)
    if share == "shard":
        return flat.view(shards, -1)
    if share == "row":
        return flat
    # [R, groups, 32], where the last group of a row is filled up with zeros
    return pad(flat, (0, -flat.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))


def _ungroup_elements(groups: Tensor, shape: torch.Size) -> Tensor:
    columns = shape[1:].numel()
    return groups.reshape(shape[0], -1)[:, :columns].reshape(shape)


def _pack_int4(scaled: Tensor) -> Tensor:
    """Pack values from -7 to 7, [..., 2 N], into bytes, [..., N]."""
    size = scaled.shape[-1]
    if size % 2:
        raise ValueError(f"rows of {size} numbers, two in a byte: take an even number, or int8")
    shifted = (scaled.round() + 8).to(torch.uint8)
    return shifted[..., ::2] * 16 + shifted[..., 1::2]


def _unpack_int4(packed: Tensor) -> Tensor:
    return torch.stack([packed // 16, packed % 16], dim=-1).flatten(-2).float() - 8


def _make_cast_extension(sent: torch.dtype) -> Extension:
    def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        # Without a copy if the gathered tensor already has this dtype.
        return gathered[0].to(dtype)

    return Extension(("numbers",), lambda shard: (shard.to(sent),), decode)


EXTENSIONS: dict[str, Extension] = {
    "fp32": _make_cast_extension(torch.float32),
    "bf16": _make_cast_extension(torch.bfloat16),
    "float8": make_quantised_extension("float8"),
    "int8": make_quantised_extension("int8"),
}


def gather_on_one_rank(weight: Tensor, ranks: int, extension: Extension) -> Tensor:
    """Return the weight [rows, ...] that ``ranks`` ranks would compute with, without them."""
    # As on ``ranks`` ranks: padded, encoded by shard, concatenated by sent tensor, decoded.
    rows = -(-len(weight) // ranks)
    padded = pad_rows(weight, rows * ranks)
    sent = [extension.encode(shard) for shard in padded.split(rows)]
    arrived = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    return extension.decode(arrived, weight.dtype)[: len(weight)]
