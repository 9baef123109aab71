"""Train a small FSDP2 model with a learner's all-gather functions."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit import tensors
from labkit.models.protocol import random_normal
from labkit.session.counted_group import GroupTraffic
from labkit.tensors import Extension, TwoTensor, pad_rows
from labkit.torch_private import (
    TorchDispatchMode,
    unsafe_preserve_version_counter,
)
from labkit_course.checks.judge import WrongAnswer, answer_name, error_text, expect
from labkit_course.hook_costs import own_bytes

Hook = Callable[..., Any]
STEPS, BATCH, LEARNING_RATE = 3, 4, 1e-2
# Weights [51, 64], [80, 51] and [33, 80]: two of them do not divide by 2 ranks, one not by 3.
HOOK_WIDTHS = (64, 51, 80, 33)
# Rows of even length, long enough to have a scale each; FSDP pads the 129 rows of the last.
CODEC_WIDTHS = (128, 128, 128, 129)
# What a hook for int8 decodes while its own memory is counted: a few rows weigh little.
LEAN_SHAPE = (256, 64)
BOTH_DTYPES = (torch.float32, torch.bfloat16)
# What hooks send of a shard's halves a and b, if every rank has to send this many rows: the right
# one, and some with a mistake.
SENDS: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    "": lambda a, b, rows: (pad_rows(a, rows), pad_rows(b, rows)),
    "sends a twice": lambda a, b, rows: (pad_rows(a, rows), pad_rows(a, rows)),
    "swaps a and b": lambda a, b, rows: (pad_rows(b, rows), pad_rows(a, rows)),
    "sends zeros for b": lambda a, b, rows: (pad_rows(a, rows), pad_rows(0 * b, rows)),
    "rounds b to bfloat16": lambda a, b, rows: (
        pad_rows(a, rows),
        pad_rows(b.bfloat16().float(), rows),
    ),
    "leaves out the padding": lambda a, b, rows: (a, b),
    "pads in front": lambda a, b, rows: (
        pad_rows(a.flip(0), rows).flip(0),
        pad_rows(b.flip(0), rows).flip(0),
    ),
}


def run_answer(*answers: Hook, what: str, **halves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Train with what a learner wrote: "cast" is a TwoTensor's post-all-gather hook, "both" puts
    two hooks onto a plain shard, "lean" is a post-all-gather hook for int8 without copies, and a
    "codec" is a pair, encode and decode. "halves" gathers ``a`` and ``b``, and tells for each of
    ``SENDS`` whether they came as they were.

    For hooks, return by dtype the answer's ``losses`` and what it ``sent``, calls and bytes by
    collective; the ``right_losses`` and ``right_sent`` of labkit's own hook; and the bytes of full
    parameters ``left`` in memory, by name.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "codec":
        return run_codec(mesh, *answers)
    if what == "halves":
        a, b = (torch.tensor(halves[name]) for name in "ab")
        return {name: gathers_right(mesh, a, b, send) for name, send in SENDS.items()}
    if what == "lean":
        return {name_dtype(dtype): run_lean(mesh, dtype, *answers) for dtype in BOTH_DTYPES}
    if what == "both":
        return {name_dtype(dtype): run_both(mesh, dtype, *answers) for dtype in BOTH_DTYPES}
    found = {}
    for dtype in BOTH_DTYPES:
        # Before the answer's, which might change what labkit's own hook uses.
        with GroupTraffic() as usual:
            right = train_steps(make_hook_model(mesh, dtype), STEPS)
        model = make_hook_model(mesh, dtype, *answers)
        with GroupTraffic() as traffic:
            losses = train_steps(model, STEPS)
        found[name_dtype(dtype)] = {
            "losses": losses,
            "sent": traffic.totals(),
            "right_losses": right,
            "right_sent": usual.totals(),
            "left": tensors.leak_bytes(model),
        }
    return found


def name_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def run_both(mesh: DeviceMesh, dtype: torch.dtype, add_hooks: Hook) -> dict[str, Any]:
    """Train with the answer's hooks for int8; count also the calls of encode (``encoded``)."""
    right = train_with_hooks(mesh, dtype, tensors.add_codec_hooks)
    names = ("losses", "sent", "encoded")
    expected = {f"right_{name}": right[name] for name in names}
    return train_with_hooks(mesh, dtype, add_hooks) | expected


def run_lean(mesh: DeviceMesh, dtype: torch.dtype, hook: Hook) -> dict[str, Any]:
    """As ``run_both``, for a post-all-gather hook; also the most bytes a number of its ``own``."""

    def add_lean_hooks(shard: Any, rows: int, encode: Hook, decode: Hook) -> None:
        tensors.add_codec_hooks(shard, rows, encode, decode)
        shard.fsdp_post_all_gather = hook

    found = run_both(mesh, dtype, add_lean_hooks)
    return found | {"own": own_bytes(hook, dtype, LEAN_SHAPE)}


def train_with_hooks(mesh: DeviceMesh, dtype: torch.dtype, add_hooks: Hook) -> dict[str, Any]:
    """Train a model whose shards have hooks from ``add_hooks(shard, rows, encode, decode)``."""
    int8, encoded = tensors.EXTENSIONS["int8"], []

    def encode(shard: Tensor) -> tuple[Tensor, ...]:
        encoded.append(len(shard))
        return int8.encode(shard)

    def add_checked_hooks(shard: Tensor, rows: int) -> None:
        add_hooks(shard, rows, encode, int8.decode)
        check_hooks(shard, mesh, answer_name(add_hooks))
        hooked: Any = shard
        hooked.fsdp_post_all_gather = partial(call_hook, hooked.fsdp_post_all_gather, Tensor)

    model = shard_layers(make_linear_stack(HOOK_WIDTHS), mesh, dtype)
    tensors.hook_shards(model, add_checked_hooks)
    encoded.clear()
    with GroupTraffic() as traffic:
        losses = train_steps(model, STEPS)
    calls = len(encoded)
    left = tensors.leak_bytes(model)
    return {"losses": losses, "sent": traffic.totals(), "encoded": calls, "left": left}


def check_hooks(shard: Any, mesh: DeviceMesh, name: str) -> None:
    """Raise WrongAnswer unless both hooks are there and all ranks send equal sizes."""
    for each in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        expect(callable(getattr(shard, each, None)), f"after {name} the shard has no {each}")
    answer = shard.fsdp_pre_all_gather(mesh)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    sent = answer[0] if is_pair else None
    is_sendable = isinstance(sent, tuple | list) and all(isinstance(each, Tensor) for each in sent)
    parts = answer if isinstance(answer, tuple) else (answer,)
    seen = f"fsdp_pre_all_gather gave {', '.join(type(each).__name__ for each in parts)}"
    expect(is_sendable, f"{seen}, not two things, a tuple of the tensors to send and a note")
    # FSDP2 would only fail, or wait for ever, in the all-gather.
    sizes: list[Any] = [None] * mesh.size()
    dist.all_gather_object(sizes, [tuple(each.shape) for each in sent or ()])
    for index, size in enumerate(sizes):
        seen = f"rank {index} sends {size_text(size)}, and rank 0 {size_text(sizes[0])}"
        expect(size == sizes[0], f"{seen}: every rank has to send `rows` rows, see pad_rows")


def size_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return shapes in words."""
    return " and ".join(map(str, shapes)) or "nothing"


class CastWatch(TorchDispatchMode):
    """Notices numbers that are not finite and become integers, whose value is not defined."""

    def __init__(self) -> None:
        super().__init__()
        self.is_undefined = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        casts = {"aten._to_copy.default": 0, "aten.copy_.default": 1}  # to the place of the source
        if str(func) in casts and not result.is_floating_point():
            self.is_undefined |= not bool(args[casts[str(func)]].isfinite().all())
        return result


def run_codec(mesh: DeviceMesh, encode: Hook, decode: Hook) -> dict[str, Any]:
    """Return the gathered ``weights`` by name; of one step, ``loss`` and what was ``sent``."""
    model = make_codec_model()
    # Outside of FSDP2, which would hide this mistake behind an error of its own.
    with CastWatch() as casts:
        sent = encode(next(model.parameters()).detach().clone())
    is_tuple = isinstance(sent, tuple) and all(isinstance(tensor, Tensor) for tensor in sent)
    given = type(sent).__name__
    expect(is_tuple, f"{answer_name(encode)} gave {given}, not a tuple of tensors")
    seen = f"{answer_name(encode)} makes an integer of NaN or infinity, whose value is not defined"
    expect(not casts.is_undefined, f"{seen}: is something divided by a row's largest number, 0?")

    shorts: list[torch.dtype] = []

    def decode_or_tell(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        try:
            whole = decode(gathered, dtype)
            # FSDP2 asks for float32 alone here. A decode without a cast shows in another dtype.
            if not shorts and whole.dtype == dtype:
                shorts.append(decode(gathered, torch.bfloat16).dtype)
        except Exception as error:
            shapes = [f"gathered[{i}] is {tuple(each.shape)}" for i, each in enumerate(gathered)]
            seen = f"{answer_name(decode)} raised {error_text(error)}"
            rule = "Which rows of the parameter does each number there belong to?"
            got = f"From {mesh.size()} ranks, {' and '.join(shapes)}"
            raise WrongAnswer(f"{seen.rstrip('.')}. {got}. {rule}") from error
        seen = f"{answer_name(decode)} gave {name_dtype(shorts[0])}" if shorts else ""
        asked = "when dtype was bfloat16: a policy may ask for it"
        expect(shorts in ([], [torch.bfloat16]), f"{seen} {asked}")
        return whole

    shard_layers(model, mesh, torch.float32)
    tensors.extend_model(model, Extension(("tensor",) * len(sent), encode, decode_or_tell))
    weights: dict[str, Any] = {}
    # fully_shard also makes each linear layer an FSDPModule, which its type does not tell.
    unit: Any
    for name, unit in model.named_children():
        unit.unshard()
        weights[name] = unit.weight.detach().clone()
        unit.reshard()
    with GroupTraffic() as traffic:
        losses = train_steps(model, steps=1)
    return {"weights": weights, "loss": losses[0][0], "sent": traffic.totals()}


def gathers_right(mesh: DeviceMesh, a: Tensor, b: Tensor, send: Hook) -> bool:
    """Tell whether FSDP2 gathers both halves [R, C] of a parameter as they are."""

    class Sending(TwoTensor):
        def fsdp_pre_all_gather(
            self, mesh: DeviceMesh, outer_size: torch.Size, stride: Any, module: Any, policy: Any
        ) -> Any:
            return send(self.a, self.b, -(-outer_size[0] // mesh.size())), None

    layer: Any = nn.Linear(a.shape[1], a.shape[0], bias=False)
    tensors.convert_parameters(layer, lambda weight: Sending(a.clone(), b.clone()))
    fully_shard(layer, mesh=mesh)
    parts = send(*tensors.plain_shards(layer.weight), -(-len(a) // mesh.size()))
    sizes: list[Any] = [None] * mesh.size()
    dist.all_gather_object(sizes, [tuple(part.shape) for part in parts])
    # FSDP2 would raise on the rank with the shorter shard, and the others would wait for it.
    if any(size != sizes[0] for size in sizes):
        return False
    layer.unshard()
    return torch.equal(layer.weight.a, a) and torch.equal(layer.weight.b, b)


def make_linear_stack(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers without bias, equal in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))


@torch.no_grad()
def make_codec_model() -> nn.Sequential:
    """Return layers whose weights differ in magnitude, with a row of zeros."""
    model = make_linear_stack(CODEC_WIDTHS)
    first, second, third = model.parameters()
    first[0] = 0
    second.mul_(1e-4)
    third[: len(third) // 2].mul_(3)
    return model


def sample_inputs(step: int, width: int) -> Tensor:
    """Return this rank's [BATCH, width] inputs."""
    seed = STEPS * dist.get_rank() + step
    return random_normal(BATCH, width, device=torch.device("cpu"), seed=seed)


def shard_layers(model: nn.Sequential, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    """Make each layer an FSDP unit that computes in ``dtype``."""
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model


def make_hook_model(
    mesh: DeviceMesh, dtype: torch.dtype, hook: Hook | None = None
) -> nn.Sequential:
    """Return a sharded model on pairs (w, 2 * w), with the hook or labkit's own."""
    model = make_linear_stack(HOOK_WIDTHS)
    method: Hook = hook or TwoTensor.fsdp_post_all_gather

    class Answered(TwoTensor):
        def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
            return call_hook(partial(method, self), TwoTensor, *args, **kwargs)

    tensors.convert_parameters(model, lambda weight: Answered(weight, 2 * weight))
    return shard_layers(model, mesh, dtype)


def call_hook(
    hook: Hook,
    kind: type[Tensor],
    gathered: Sequence[Tensor],
    metadata: None,
    dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """Call a post-all-gather hook; raise WrongAnswer for a result that FSDP2 cannot use."""
    if out is None:
        answer = hook(gathered, metadata, dtype)
        check_first_call(answer, gathered, dtype, kind)
        return answer
    # FSDP2 has just allocated this memory again and the old values may still be in it. NaNs
    # expose a hook that does not write them; a view of what was gathered is left alone.
    if not storage_pointers([out]) & storage_pointers(gathered):
        with torch.no_grad(), unsafe_preserve_version_counter(out):
            for plain in tensors.plain_tensors(out):
                plain.fill_(torch.nan)
    return hook(gathered, metadata, dtype, out=out)


def check_first_call(
    answer: Any, gathered: Sequence[Tensor], dtype: torch.dtype, kind: type[Tensor]
) -> None:
    """Raise WrongAnswer unless a hook may return this on the first call."""
    parts = answer if isinstance(answer, tuple) else (answer,)
    is_pair = answer is parts and len(parts) == 2 and isinstance(parts[0], kind)
    # The class of the check's own tensors has a name that no learner has seen.
    names = [kind.__name__ if isinstance(each, kind) else type(each).__name__ for each in parts]
    seen = f"on the first call the hook gave {', '.join(names)}"
    rule = f"not two things, a {kind.__name__} and a tuple of the tensors to free"
    expect(is_pair, f"{seen}, {rule}")
    whole, freed = parts
    is_tuple = isinstance(freed, tuple | list) and all(isinstance(each, Tensor) for each in freed)
    rule = "the second part of the answer must be a tuple of the tensors to free"
    expect(is_tuple, f"on the first call {rule}")
    seen = f"the parameter is {(*whole.shape,)} in {whole.dtype}"
    rule = f"not {(*gathered[0].shape,)} in {dtype}: all that was gathered, padding included"
    expect(whole.shape == gathered[0].shape and whole.dtype == dtype, f"{seen}, {rule}")
    is_view = storage_pointers([whole]) <= storage_pointers(gathered)
    may_copy = any(each.dtype != dtype for each in gathered)
    rule = "what was gathered has the right dtype already, and a copy of it needs the memory twice"
    expect(is_view or may_copy, rule)


def storage_pointers(given: Sequence[Tensor]) -> set[int]:
    """Return the storage addresses of the tensors."""
    plain = [each for tensor in given for each in tensors.plain_tensors(tensor)]
    return {each.untyped_storage().data_ptr() for each in plain}


def train_steps(model: nn.Sequential, steps: int) -> list[list[Tensor]]:
    """Train on this rank's samples; return its loss in each step, both for a TwoTensor."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=True)
    width, losses = next(model.parameters()).shape[1], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(sample_inputs(step, width)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(tensors.plain_tensors(loss.detach()))
    return losses
