"""Replicated data parallelism, with DDP's own reducer or with the compiler.

Every rank holds the whole model and averages the gradients of its own samples with the other ranks.
One all-reduce per gradient would cost too many messages, and a single one for all gradients would
start too late, so gradients travel in *buckets*.

    eager      hooks fill DDP's buckets while autograd runs; a full bucket is sent at once
    compiled   compiled autograd traces the backward pass into one graph, with an all-reduce and a
               wait for each gradient; an inductor pass fuses the all-reduces into buckets and moves
               each wait to the gradient's first use

    # build the model and run both passes inside
    with fuse_all_reduces("concat", bucket_mb=25), compile_backward():
        model = apply_replicate(LinearChain(), mesh)
        apply_compile(model)
        model(x).sum().backward()
        pop_bucket_count()                                        # 3

Sources: Li et al., "PyTorch Distributed", 2020 (arXiv:2006.15704); pytorch/pytorch#110662 (traced
backward pass); torch/_inductor/fx_passes/ddp_fusion.py (fusion).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from labkit import torch_private
from labkit.parallel.compiling import apply_compile
from labkit.pause import has_pauses
from labkit.torch_private import replicate

FuseMode = Literal["none", "coalesced", "concat"]
DDPMode = Literal["ddp", "replicate", "compiled_ddp", "compiled", "yours"]
DEFAULT_BUCKET_MB = 25.0


@dataclass(frozen=True)
class DDPCase:
    """One way to train with DDP and the compiler."""

    dtype: torch.dtype = torch.float32  # gradients travel in it
    forward: bool = True  # compile the forward pass as well as the backward pass
    checkpoint: bool = False  # recompute the first layer in the backward pass
    # For each batch of a step, whether its backward pass averages gradients or only accumulates.
    batches: tuple[bool, ...] = (True,)


DDP_CASES = {
    "cpu": DDPCase(),
    "cpu_no_sync": DDPCase(batches=(False, True)),
    "gpu": DDPCase(),
    "bf16": DDPCase(torch.bfloat16),
    "fp16": DDPCase(torch.float16),
    "backward_only": DDPCase(forward=False),
    "checkpoint": DDPCase(checkpoint=True),
}


@contextlib.contextmanager
def apply_technique(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: DDPMode,
    case: DDPCase,
    *,
    fuse: FuseMode = "coalesced",
    bucket_mb: float = DEFAULT_BUCKET_MB,
    inductor: bool = True,  # generate code; otherwise run the traced graphs
    late_waits: bool = True,  # wait where a gradient is first used
    yours: Callable[..., nn.Module] | None = None,  # called like apply_ddp
) -> Iterator[tuple[Any, list[str]]]:
    """Apply one technique; run both passes in this context.

    It yields the model to call, and a list that fills with the code that inductor generates.
    """
    programs: list[str] = []
    compiled = mode in ("compiled", "compiled_ddp")
    apply: Callable[..., Any] = apply_ddp if mode in ("ddp", "compiled_ddp") else apply_replicate
    if mode == "yours":
        assert yours and case.dtype == torch.float32, "the program refuses other cases"
        apply = yours
    with contextlib.ExitStack() as stack:
        if compiled:
            stack.enter_context(fuse_all_reduces(fuse, bucket_mb, late_waits=late_waits))
            stack.enter_context(compile_backward(inductor=inductor))
            programs = stack.enter_context(capture_generated_code())
        # Inside the settings, because DDP chooses its reducer when it is built.
        replicated = apply(model, mesh, bucket_mb=bucket_mb)
        compress_gradients(replicated, mesh, case.dtype)
        # Last and as a whole: the compiler only fuses all-reduces that it sees.
        if compiled and case.forward:
            apply_compile(replicated, inductor=inductor)
        yield replicated, programs


def apply_ddp(
    model: nn.Module, mesh: DeviceMesh, *, bucket_mb: float = DEFAULT_BUCKET_MB
) -> DistributedDataParallel:
    """Wrap a model with DistributedDataParallel, which copies rank 0's parameters to all ranks.

    A bucket is sent once it holds ``bucket_mb`` MiB; at the default of 25, the first one at 1 MiB
    already. The first backward pass sends everything in one bucket, because only then does DDP
    learn in which order gradients become ready.
    """
    return DistributedDataParallel(model, device_mesh=mesh, bucket_cap_mb=_bucket_cap_mb(bucket_mb))


def apply_replicate(
    model: nn.Module, mesh: DeviceMesh, *, bucket_mb: float = DEFAULT_BUCKET_MB
) -> nn.Module:
    """Replicate a model in place, as ``apply_ddp`` without a wrapper: parameter names stay.

    DTensor parameters on another axis leave ``parameters()`` after the first forward pass.
    """
    return replicate(model, device_mesh=mesh, bucket_cap_mb=_bucket_cap_mb(bucket_mb))


def _bucket_cap_mb(bucket_mb: float) -> float | None:
    # DDP keeps its small first bucket only for None, not for the equal value 25.
    return None if bucket_mb == DEFAULT_BUCKET_MB else bucket_mb


def compress_gradients(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Round gradients to a shorter dtype before they are summed, and convert the sum to float32.

    Compiled, every gradient then travels alone: inductor only fuses all-reduces whose result is the
    gradient.
    """
    bf16, fp16 = default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook
    hook = {torch.bfloat16: bf16, torch.float16: fp16}.get(dtype)
    if hook:
        # A lambda, because DDP refuses the name bf16_compress_hook without a GPU, and annotations
        # that are strings.
        model.register_comm_hook(mesh.get_group(), lambda state, bucket: hook(state, bucket))


@contextlib.contextmanager
def gradient_sync(model: Any, enabled: bool) -> Iterator[None]:
    """Average gradients in this context, or, if not enabled, let each rank accumulate its own."""
    with contextlib.ExitStack() as stack:
        if not enabled and hasattr(model, "no_sync"):
            stack.enter_context(model.no_sync())
        # ``replicate`` has a switch instead.
        elif not enabled:
            model.set_requires_gradient_sync(False)
            stack.callback(model.set_requires_gradient_sync, True)
        yield


def note_order(model: DistributedDataParallel) -> list[str]:
    """Return a list that fills with each gradient that is ready and each bucket that leaves."""
    seen: list[str] = []

    def leave(state: Any, bucket: Any) -> Any:
        seen.append(f"[bucket {bucket.index()} leaves]")
        return default_hooks.allreduce_hook(model.process_group, bucket)

    for name, parameter in model.module.named_parameters():
        short = name.removesuffix(".weight")
        parameter.register_post_accumulate_grad_hook(lambda _, short=short: seen.append(short))
    # DDP compares the annotations of a hook with its own.
    leave.__annotations__ = {}
    model.register_comm_hook(None, leave)
    return seen


def backward_programs(loss: torch.Tensor) -> list[Any]:
    """Return the nodes of autograd that run compiled backward programs, in the order of running.

    In a model that is a chain; where a node has several inputs, the first one is followed.
    """
    programs, node = [], loss.grad_fn
    while node:
        programs += [node] * ("Compiled" in node.name())
        before = [
            each for each, _ in node.next_functions if each and "Accumulate" not in each.name()
        ]
        node = before[0] if before else None
    return programs


@contextlib.contextmanager
def compile_inside_ddp(model: nn.Module, *, split: bool) -> Iterator[list[Any]]:
    """Compile the module inside a DDP model, which stays DDP's to average, and run it inside.

    With ``split``, PyTorch's default, DDPOptimizer cuts the graph where DDP's buckets end, so that
    each piece has a backward program of its own. The programs run operator by operator: when
    gradients are complete is of interest here, and not how fast a piece is. Yields the graphs.

    As ``torch.compile(DistributedDataParallel(module))``, but with none of DDP itself compiled.
    """
    graphs: list[Any] = []

    def run_as_traced(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch_private.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    try:
        with torch_private.get("_dynamo:config").patch(optimize_ddp=split):
            model.compile(backend=run_as_traced, dynamic=False)
            yield graphs
    finally:
        torch.compiler.reset()


@contextlib.contextmanager
def fuse_all_reduces(
    mode: FuseMode = "coalesced", bucket_mb: float = DEFAULT_BUCKET_MB, *, late_waits: bool = True
) -> Iterator[None]:
    """Let the compiler average DDP's gradients and fuse the all-reduces into buckets.

    Build, call and differentiate models inside, with the backward pass in ``compile_backward``.
    ``coalesced`` passes a bucket's gradients to one call, ``concat`` copies them into one flat
    tensor, ``none`` sends each alone. A bucket closes once it holds ``bucket_mb`` MiB, the first
    one at 1 MiB. With ``late_waits`` the program waits where a gradient is first used.
    """
    # Looked up here, because that loads the compiler.
    passes: list[Any] = [torch_private.ddp_fusion.schedule_comm_wait] if late_waits else []
    if mode != "none":
        fuse = getattr(torch_private.ddp_fusion, f"fuse_ddp_with_{mode}_op")
        # A function, because inductor would call a pass given by name with DDP's bucket size,
        # rounded down to whole MiB.
        passes.insert(0, lambda graph: fuse(graph, bucket_mb))
    settings = {
        "_fuse_ddp_communication": True,
        "_fuse_ddp_communication_passes": passes,
        "_fuse_ddp_bucket_size": 25,
        # It is for inference, and mistakes a compiled backward pass for it.
        "reorder_for_locality": False,
        # It would put all pauses first, and the gradients that they stand for behind them.
        "reorder_for_peak_memory": not has_pauses(),
    }
    rules, counts = torch_private.trace_rules, torch_private.counters["inductor"]
    inlined = set(rules.LEGACY_MOD_INLINELIST)
    # Code that was compiled with other settings would be used again.
    torch.compiler.reset()
    try:
        # python_reducer even if only the backward pass is compiled: with the mode meant for that,
        # DDP keeps its own reducer and the backward pass does not compile (pytorch/pytorch#152735).
        with (
            torch_private.get("_dynamo:config").patch(optimize_ddp="python_reducer"),
            torch_private.get("_inductor:config").patch(settings),
            mock.patch.dict(counts),
        ):
            counts.pop("ddp_buckets", None)
            yield
    finally:
        torch.compiler.reset()
        # DDP adds modules to this list when it is built.
        rules.LEGACY_MOD_INLINELIST.intersection_update(inlined)
        rules.get_legacy_mod_inlinelist.cache_clear()


@contextlib.contextmanager
def compile_backward(*, inductor: bool = True) -> Iterator[None]:
    """Trace ``backward()`` with compiled autograd, DDP's all-reduces included, and compile it.

    Without ``inductor`` the traced graph runs as it is, with nothing fused.
    """
    # Static shapes: a DTensor's backward pass does not compile with dynamic ones (torch 2.13).
    how: dict[str, Any] = {"dynamic": False, "backend": "inductor" if inductor else "eager"}
    compile_graph = partial(torch.compile, fullgraph=True, **how)
    with torch_private.compiled_autograd._enable(compile_graph, dynamic=False):
        yield


def pop_bucket_count() -> int:
    """Return the number of buckets that inductor has made since the last call."""
    return int(torch_private.counters["inductor"].pop("ddp_buckets", 0))


def count_traced_backwards() -> int:
    """Count the backward passes that compiled autograd has traced in this process."""
    return int(torch_private.counters["compiled_autograd"]["captures"])


@contextlib.contextmanager
def capture_generated_code() -> Iterator[list[str]]:
    """Collect the code that inductor generates; a backward pass contains ``_c10d_functional``."""
    programs: list[str] = []
    # Without the cache, from which code would be loaded instead of generated.
    no_cache = torch_private.get("_inductor:config").patch(fx_graph_cache=False)
    graph = torch_private.GraphLowering
    with no_cache, mock.patch.object(graph, "save_output_code", programs.append):
        yield programs
