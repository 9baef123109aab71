"""Gather parameters in fewer bytes: hooks on the plain local tensors of an FSDP2 model.

FSDP2 looks for its two hooks on the local tensor of each sharded parameter, whatever its type. So a
plain tensor can have them too. The optimizer updates the float32 rows, so rounding only affects
computation:

    float32 rows --encode--> (values, scales) --all-gather--> all of them --decode--> parameter

Shapes: P rows on every rank after padding, W ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from labkit.tensors.two_tensor import pad_rows, refill

FLOAT8 = torch.float8_e4m3fn
GROUP_SIZE = 32
"""Elements of a row that share a scale in a group."""
_MAX_VALUES: dict[str, float] = {"float8": torch.finfo(FLOAT8).max, "int8": 127, "int4": 7}
_DEFAULT_SCALES = {"float8": "shard", "int8": "row", "int4": "row"}


@dataclass(frozen=True)
class Extension:
    """How a parameter is sent: in tensors, which ``sends`` names."""

    sends: tuple[str, ...]
    # From a shard [P, ...] to the tensors to send, each W times longer once it is gathered.
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    # From all gathered tensors and a dtype to the parameter [W * P, ...] in that dtype.
    decode: Callable[[Sequence[Tensor], torch.dtype], Tensor]


def extend_model(model: nn.Module, extension: str | Extension) -> int:
    """Extend every parameter of two or more dims, and return how many; call it after
    ``fully_shard`` and ``to_empty``, and before the first forward pass.
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
        raise ValueError(
            f"a parameter of {shape} is not sharded along dim 0: call fully_shard first"
        )
    if parameter.ndim < 2:
        raise ValueError(f"a vector of shape {shape} has no rows to scale: leave it as it is")
    if parameter.is_meta:
        raise ValueError(f"a parameter of shape {shape} is on the meta device: call to_empty first")
    # FSDP2 looks for hooks on this object; ``to_local`` would return a view of it (2.13).
    local: Tensor = parameter._local_tensor
    hooks = _GatherHooks(chosen, local, parameter.shape, parameter.device_mesh.size())
    local.fsdp_pre_all_gather = hooks.pre_all_gather  # type: ignore[attr-defined]
    local.fsdp_post_all_gather = hooks.post_all_gather  # type: ignore[attr-defined]


class _GatherHooks:
    """FSDP2's two hooks of one parameter, which call an Extension and check its results."""

    def __init__(self, extension: Extension, local: Tensor, shape: torch.Size, ranks: int):
        self.extension, self.local = extension, local
        # P, on every rank
        self.rows = -(-shape[0] // ranks)
        self.gathered_shape = (self.rows * ranks, *shape[1:])

    # With the signature (mesh) FSDP2 accepts tensors of any shape. With all five arguments it wants
    # the padded shape on a shorter last shard, which scales do not have.
    def pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        sent, names = self.extension.encode(pad_rows(self.local, self.rows)), self.extension.sends
        if len(sent) != len(names):
            wanted = f"{len(names)}: {', '.join(names)}"
            raise ValueError(f"encode gave {len(sent)} tensors to send, not {wanted}")
        return tuple(tensor.contiguous() for tensor in sent), None

    def post_all_gather(
        self,
        gathered: Sequence[Tensor],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        whole = self.extension.decode(gathered, param_dtype)
        self._check_parameter(whole, param_dtype)
        shared = _storage_id(whole) in map(_storage_id, gathered)
        if out is None:
            # FSDP2 frees the gathered tensors itself. Naming them here as well would be wrong: it
            # computes the memory of named tensors from their number of elements.
            return whole, () if shared else (whole,)
        if _storage_id(whole) != _storage_id(out):
            refill(out, whole)
        return None

    def _check_parameter(self, whole: Tensor, dtype: torch.dtype) -> None:
        wanted, given = self.gathered_shape, tuple(whole.shape)
        if given != wanted or whole.dtype != dtype or not whole.is_contiguous():
            raise ValueError(
                f"decode gave {given} in {whole.dtype}, not the contiguous parameter of all ranks,"
                f" {wanted} in {dtype}: undo what encode did to a shard of {self.rows} rows"
            )
        if whole.untyped_storage().nbytes() != whole.nbytes:
            raise ValueError(
                "decode gave a view of a larger tensor, which cannot be freed: clone it"
            )


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def make_quantised_extension(numbers: str, scales: str = "") -> Extension:
    """Send ``numbers`` (float8, int8 or int4), and the scales by which they were divided.

    A "shard", each "row", or each "group" of 32 elements of a row has a scale of its own. Two int4
    numbers share a byte, so rows must have an even length.
    """
    if numbers not in _MAX_VALUES:
        raise ValueError(f"{numbers} has no scales: take {', '.join(_MAX_VALUES)}")
    share = scales or _DEFAULT_SCALES[numbers]
    if share not in _SCALE_MAXIMA:
        raise ValueError(f"scales {scales!r} is none of {', '.join(_SCALE_MAXIMA)}")

    def encode(shard: Tensor) -> tuple[Tensor, Tensor]:
        # [P, columns]
        flat = shard.flatten(1)
        largest = _SCALE_MAXIMA[share](flat.abs()).float()
        # A shard of zeros must not divide by 0.
        chosen = (largest / _MAX_VALUES[numbers]).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (flat / _expand_scales(chosen, flat, share)).view(shard.shape)
        if numbers == "int4":
            return _pack_int4(scaled), chosen
        if numbers == "int8":
            return scaled.round().to(torch.int8), chosen
        # Gloo lacks this dtype, but next to a tensor of another dtype FSDP2 sends plain bytes.
        return scaled.to(FLOAT8), chosen

    def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        sent, chosen = gathered
        whole = _unpack_int4(sent) if numbers == "int4" else sent.float()
        # [W * P, columns]
        flat = whole.flatten(1)
        return (flat * _expand_scales(chosen, flat, share)).view(whole.shape).to(dtype)

    return Extension(("numbers", f"one scale a {share}"), encode, decode)


def _pack_int4(scaled: Tensor) -> Tensor:
    """Pack values from -7 to 7, [..., 2 N], into bytes, [..., N]."""
    if scaled.shape[-1] % 2:
        size = scaled.shape[-1]
        raise ValueError(
            f"int4 puts two numbers in a byte: rows of {size} must be even, or take int8"
        )
    shifted = (scaled.round() + 8).to(torch.uint8)
    return shifted[..., ::2] * 16 + shifted[..., 1::2]


def _unpack_int4(packed: Tensor) -> Tensor:
    return torch.stack([packed // 16, packed % 16], dim=-1).flatten(-2).float() - 8


def _group_maxima(flat: Tensor) -> Tensor:
    # The last group of a row may be shorter.
    whole = pad(flat, (0, -flat.shape[1] % GROUP_SIZE))
    return whole.unflatten(1, (-1, GROUP_SIZE)).amax(dim=2)


def _expand_scales(scales: Tensor, flat: Tensor, share: str) -> Tensor:
    """Return scales that broadcast over ``flat``, [rows, columns]."""
    # One scale per shard: [W] -> [rows, 1], for the rows of all gathered shards.
    if share == "shard":
        return scales.view(-1, 1).repeat_interleave(len(flat) // len(scales), dim=0)
    # [rows, groups] -> [rows, columns]
    if share == "group":
        return scales.repeat_interleave(GROUP_SIZE, dim=1)[:, : flat.shape[1]]
    return scales


_SCALE_MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "shard": lambda flat: flat.max().reshape(1),
    "row": lambda flat: flat.amax(dim=1, keepdim=True),
    "group": _group_maxima,
}


def _decode_cast(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    # Without a copy if the gathered tensor already has this dtype.
    return gathered[0].to(dtype)


EXTENSIONS: dict[str, Extension] = {
    "fp32": Extension(("numbers",), lambda shard: (shard.float(),), _decode_cast),
    "bf16": Extension(("numbers",), lambda shard: (shard.bfloat16(),), _decode_cast),
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
