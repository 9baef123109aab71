"""Run a learner's plans, layers and autograd functions on a mesh of ranks.

Ranks along ``tp`` share the weight matrices; ranks along ``data`` have different samples.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn import functional

from labkit.models.blocks import TransformerBlock
from labkit.models.mlp import MLPStack
from labkit.models.protocol import LabModel, random_normal, random_tokens
from labkit.parallel.small_tensor_parallel import RowParallel
from labkit.session.counted_group import GroupTraffic
from labkit_course.checks.judge import error_text, expect, value_text

# 2 ranks, or 3, can share features, tokens, heads and words: PyTorch's plans need even shares.
DIM, BATCH, TOKENS, HEAD_WIDTH, VOCABULARY_SIZE = 12, 4, 6, 2, 18
INNER = 4 * DIM
# Sizes of the axes data and tp, by the number of ranks.
MESH_SHAPES = {4: (2, 2), 3: (1, 3)}
# The functions at a pair's ends, in the order of the check's arguments.
ENDS = ("copy", "sum")
CPU = torch.device("cpu")


class Block(TransformerBlock, LabModel):
    """One transformer block of six heads on features [4, 6, 12]."""

    def __init__(self) -> None:
        super().__init__(DIM, HEAD_WIDTH, INNER)

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Return features [4, 6, 12]."""
        return (random_normal(BATCH, TOKENS, DIM, device=device, seed=seed),)


class CutBlock(Block):
    """The block again; on ranks its tokens come in cut along ``tp``, and leave so."""


class Words(LabModel):
    """Embedding and output layer of a language model: token ids [N, S] to logits [N, S, V]."""

    def __init__(self, dim: int, words: int):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(functional.silu(self.embed(ids)))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Return token ids [4, 6]."""
        return (random_tokens(BATCH, TOKENS, below=VOCABULARY_SIZE, device=device, seed=seed),)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the mean cross-entropy with the input tokens as targets."""
        return functional.cross_entropy(output.flatten(0, 1), inputs[0].flatten())


class LanguageModel(Words):
    """Lab 5b's language model: token ids [N, S] to logits [N, S, V]."""

    def __init__(self) -> None:
        super().__init__(DIM, VOCABULARY_SIZE)
        self.norm, self.last_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, INNER), nn.Linear(INNER, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x))


class Stack(MLPStack):
    """Three MLPs on features [4, 6, 12]."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.input_shape = BATCH, TOKENS, DIM


MODELS: dict[str, Callable[[], LabModel]] = {
    "block": Block,
    "cut_block": CutBlock,
    "words": lambda: Words(DIM, VOCABULARY_SIZE),
    "language": LanguageModel,
    "stack": Stack,
}


def run_answer(*answers: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call a plan for one of ``MODELS``, a pair's ends, its second layer, or a model's step."""
    # torch warns about a wrong plan; the learner gets the verdict instead.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    shape = MESH_SHAPES[dist.get_world_size()]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp"))
    if what in MODELS:
        return run_plan(answers[0], mesh, what)
    if what == "step":
        return run_step(answers[0], mesh)
    if what == "row":
        # First, because an answer may change what labkit's own layer uses.
        right = run_layer(RowParallel, mesh)
        return {"right": right} | run_layer(answers[0], mesh)
    return {name: run_function(each, mesh) for name, each in zip(ENDS, answers, strict=True)}


def run_function(answer: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Run forward and backward of an autograd.Function on this rank's tensor and gradient.

    Returns:
        What it ``got`` forward, the gradient ``grad``, the tensors that it was given, ``x`` and
        ``arrived``, and what it ``sent`` in each pass.
    """
    given, arrives = rank_tensors(mesh.get_rank())
    # An answer may change either in place, which the check reports.
    x, arrived = given.clone().requires_grad_(), arrives.clone()
    with GroupTraffic() as forward:
        got = answer.apply(x, mesh["tp"].get_group())
    with GroupTraffic() as backward:
        if isinstance(got, Tensor) and got.requires_grad:
            got.backward(arrived)
    got = got if isinstance(got, Tensor) else type(got).__name__
    sent = {"forward": totals_by_axis(forward, mesh), "backward": totals_by_axis(backward, mesh)}
    return {"got": got, "grad": x.grad, "x": x.detach(), "arrived": arrived, "sent": sent}


def totals_by_axis(traffic: GroupTraffic, mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return calls and bytes by axis and collective, such as "tp/all_reduce".

    The group of all ranks is "world", unless it is an axis; "new_group" is the answer's own.
    """
    groups = {"world": dist.group.WORLD} | {axis: mesh[axis].get_group() for axis in ("data", "tp")}
    axes = {str(group.group_name): axis for axis, group in groups.items() if group}
    total: dict[str, list[int]] = {}
    for call in traffic.calls():
        counted = total.setdefault(f"{axes.get(call.group, 'new_group')}/{call.name}", [0, 0])
        counted[0] += 1
        counted[1] += call.bytes
    return total


def rank_tensors(index: int) -> tuple[Tensor, Tensor]:
    """Return a rank's input and its incoming gradient, [3, 4] each."""
    draw = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)


def run_layer(make_share: Callable[..., Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Run both passes of this rank's share of a pair's second layer.

    Returns:
        The ``given`` input and gradient, ``arrived``; as far as the passes run, ``parameters`` of
        every rank by name; ``output`` or ``error``; ``grad`` of the input; ``gradients`` by name;
        what was sent, as from ``totals_by_axis``, ``forward`` and ``backward``.
    """
    group, tp, place = mesh["tp"].get_group(), mesh["tp"].size(), mesh["tp"].get_local_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Linear(INNER, DIM)
    # Ranks along data have different samples, and ranks along tp share these.
    draw = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x, arrived = torch.randn(3, INNER, generator=draw), torch.randn(3, DIM, generator=draw)
    given = x.chunk(tp, -1)[place]
    share = make_share(layer, group)
    held: Any = type(share).__name__
    if isinstance(share, nn.Module):
        held = {name: each.detach().clone() for name, each in share.named_parameters()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    found: dict[str, Any] = {"given": given, "arrived": arrived, "parameters": everyone}
    if not isinstance(share, nn.Module):
        return found
    mine = given.clone().requires_grad_()
    try:
        with GroupTraffic() as forward:
            output = share(mine)
    except RuntimeError as error:
        return found | {"error": error_text(error).splitlines()[0]}
    found |= {"output": output, "forward": totals_by_axis(forward, mesh)}
    if not isinstance(output, Tensor):
        return found | {"output": type(output).__name__}
    # The check reports the shape; a backward pass would raise an error that hides it.
    if output.shape != arrived.shape:
        return found
    with GroupTraffic() as backward:
        output.backward(arrived.clone())
    found["gradients"] = {name: each.grad for name, each in share.named_parameters()}
    return found | {"grad": mine.grad, "backward": totals_by_axis(backward, mesh)}


def run_plan(answer: Callable[[], Any], mesh: DeviceMesh, model: str) -> dict[str, Any]:
    """Train one step with the answer's plan along tp, and FSDP along data.

    Returns:
        As far as the model runs: this rank's index along ``data``; the shape of each parameter
        ``held`` before FSDP; ``output``; full ``gradients``; what was ``sent``, as from
        ``totals_by_axis``; local output shapes ``between`` modules; ``entered``, the last layer
        called, its local and its full input features; ``error``, which stopped the step.
    """
    cut, plan, place = make_exercise_model(model), answer(), mesh["data"].get_local_rank()
    check_plan_form(plan, cut)
    line = cut.get_input(CPU, seed=place)
    found: dict[str, Any] = {"data": place, "entered": [], "between": {}}

    def note_input(name: str, module: nn.Linear, inputs: Any) -> None:
        found["entered"] = [name, local_part(inputs[0]).shape[-1], module.in_features]

    def note_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        found["between"][name] = [*local_part(output).shape]

    # Before the plan's hooks, which change what a layer receives.
    for name, module in cut.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(note_input, name))
    try:
        # FSDP comes last, so that it shards what the plan has cut already.
        parallel.parallelize_module(cut, mesh["tp"], plan)
        if isinstance(cut, CutBlock):
            cut_tokens_around(cut, mesh["tp"])
        for name, module in cut.named_modules():
            module.register_forward_hook(partial(note_output, name))
        found["held"] = {name: [*local_part(each).shape] for name, each in cut.named_parameters()}
        fully_shard(cut, mesh=mesh["data"])
        with GroupTraffic() as traffic:
            output = cut(*line)
            # A language model's logits may stay cut, as a DTensor that knows the whole.
            joins = isinstance(cut, LanguageModel) and isinstance(output, DTensor)
            output = output.full_tensor() if joins else local_part(output)
            found["output"] = output.detach().clone()
            cut.get_loss(line, output).backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError) as error:
        return found | {"error": error_text(error).splitlines()[0]}
    gradients = {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in cut.named_parameters()
    }
    return found | {"gradients": gradients, "sent": totals_by_axis(traffic, mesh)}


def language_plan() -> dict[str, parallel.ParallelStyle]:
    """Return a plan of a LanguageModel whose tokens and logits stay cut."""
    whole, cut = Replicate(), Shard(1)
    return {
        "embed": parallel.RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=cut),
        "down": parallel.RowwiseParallel(output_layouts=cut),
        "last_norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=cut, use_local_output=False),
    }


def language_step(model: nn.Module, ids: Tensor, mesh: DeviceMesh, plan: Any) -> None:
    """Share a language model over both axes, and compute its gradients: the right answer."""
    parallel.parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["data"])
    with parallel.loss_parallel():
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()


def language_ids(place: int) -> Tensor:
    """Return the token ids [4, 7] of a place along ``data``: six tokens, and the next of each."""
    return random_tokens(BATCH, TOKENS + 1, below=VOCABULARY_SIZE, device=CPU, seed=place)


def run_step(answer: Callable[..., Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Run a step's forward and backward pass with the answer on both axes, and with the right one.

    Returns:
        The full ``gradients``, None where there is none; ``held``, the elements of each parameter
        on this rank; what was ``sent``; and both of the right step, ``right_held``, ``right_sent``.
    """
    found: dict[str, Any] = {}
    for start, step in (("right_", language_step), ("", answer)):
        model = make_exercise_model("language")
        with GroupTraffic() as traffic:
            step(model, language_ids(mesh["data"].get_local_rank()), mesh, language_plan())
        found[f"{start}sent"] = totals_by_axis(traffic, mesh)
        named = dict(model.named_parameters())
        found[f"{start}held"] = {name: local_part(each).numel() for name, each in named.items()}
        found["gradients"] = {
            name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
            for name, each in named.items()
        }
    return found


def cut_tokens_around(module: nn.Module, line: DeviceMesh) -> None:
    """Cut the whole input [N, S, D] of a module along its tokens, and gather its cut output."""
    whole, cut = Replicate(), Shard(1)
    how: dict[str, Any] = {"input_layouts": whole, "desired_input_layouts": cut}
    how |= {"use_local_input": True, "output_layouts": cut, "desired_output_layouts": whole}
    parallel.parallelize_module(module, line, parallel.PrepareModuleInputOutput(**how))


def make_exercise_model(name: str) -> LabModel:
    """Return a model of ``MODELS`` with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_plan_form(plan: Any, model: nn.Module) -> None:
    """Raise WrongAnswer unless a plan maps layer names to parallel styles."""
    said = f"the plan is {value_text(plan)}"
    expect(isinstance(plan, dict), f"{said}, not a dict such as {{'up': ColwiseParallel()}}")
    # Torch ignores a name that no layer has, with a warning. Norms need a style if tokens are cut.
    layers = (
        nn.Linear,
        nn.Embedding,
        *([nn.RMSNorm] if isinstance(model, CutBlock | LanguageModel) else []),
    )
    there = [name for name, module in model.named_modules() if isinstance(module, layers)]
    for name, style in plan.items():
        said = f"there is no layer {value_text(name)}: there are {', '.join(there)}"
        expect(name in there, said)
        said = f"{name} is to be {value_text(style)}: write ColwiseParallel() or RowwiseParallel()"
        expect(isinstance(style, parallel.ParallelStyle), said)
