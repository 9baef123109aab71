"""On a rank: a learner's plan puts a model on a 2 x 2 mesh, or the learner's functions and layers
share a matrix there.

Ranks along ``tp`` share the matrices; ranks along ``data`` take their own samples.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, parallel
from torch.nn import functional

from labkit.checks.judge import WrongAnswer, error_text, value_text
from labkit.models.mlp import MLPStack
from labkit.models.protocol import LabModel, random_normal, random_tokens
from labkit.session.traffic import CommunicationCounter

DIM, BATCH, TOKENS, HEAD_DIM, VOCABULARY_SIZE = 8, 4, 8, 2, 12
INNER = 4 * DIM
DATA, TP = 2, 2
LAYER_SHAPES = {"column": (DIM, INNER), "row": (INNER, DIM)}
"""Numbers in and out of each layer of a pair."""
CPU = torch.device("cpu")


class Block(LabModel):
    """A block of a language model: attention of four heads, then a gated MLP. [N, S, D] to the
    same. No norms.
    """

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """[4, 8, 8]."""
        return (random_normal(BATCH, TOKENS, DIM, device=device, seed=seed),)


class Words(LabModel):
    """The two ends of a language model: token ids [N, S] to features, and features to logits [N, S,
    V].
    """

    def __init__(self, dim: int, words: int):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(functional.silu(self.embed(ids)))

    def get_input(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """[4, 8], token ids."""
        return (random_tokens(BATCH, TOKENS, below=VOCABULARY_SIZE, device=device, seed=seed),)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Mean cross-entropy with the token itself."""
        return functional.cross_entropy(output.flatten(0, 1), inputs[0].flatten())


MODELS: dict[str, Callable[[], LabModel]] = {
    "block": lambda: Block(DIM, INNER),
    "words": lambda: Words(DIM, VOCABULARY_SIZE),
    "stack": lambda: MLPStack(DIM, batch=BATCH),
}


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer: a plan for one of ``MODELS``, an autograd.Function ("copy", "sum"), a layer
    of ``LAYERS``.
    """
    warnings.simplefilter(
        "ignore"
    )  # a wrong plan makes torch warn, and here the verdict is what counts
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (DATA, TP), mesh_dim_names=("data", "tp"))
    if what in MODELS:
        return run_plan(answer, mesh, what)
    return run_layer(answer, mesh, what) if what in LAYER_SHAPES else run_function(answer, mesh)


def run_function(answer: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Apply an autograd.Function to a tensor of this rank's own, and send a gradient of its own
    back.

    Returns:
        ``got``, the result or the type of what is none; ``grad`` of the tensor; ``x`` and
        ``arrived``, the tensor and the gradient as they are after that.
    """
    given, arrives = rank_tensors(mesh.get_rank())
    x, arrived = given.clone().requires_grad_(), arrives.clone()
    got = answer.apply(x, mesh["tp"].get_group())
    if isinstance(got, Tensor) and got.requires_grad:
        got.backward(arrived)
    got = got if isinstance(got, Tensor) else type(got).__name__
    return {"got": got, "grad": x.grad, "x": x.detach(), "arrived": arrived}


def rank_tensors(index: int) -> tuple[Tensor, Tensor]:
    """What a rank is given, and the gradient of what its function returns, [3, 4] each."""
    draw = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)


def run_layer(answer: Callable[..., Any], mesh: DeviceMesh, which: str) -> dict[str, Any]:
    """Let the answer make this rank's share of a linear layer; one forward and one backward pass.

    Returns:
        ``parameters`` of every rank by name, or the type of what is no module; ``output``, or
        ``error``, which came of the forward pass; ``grad`` of the input, ``gradients`` by name;
        ``forward`` and ``backward``, the calls along tp in each pass.
    """
    line, place = mesh["tp"], mesh["tp"].get_local_rank()
    layer, x, gradient = whole_layer(which, mesh["data"].get_local_rank())
    share = answer(layer, line.get_group())
    held: Any = type(share).__name__
    if isinstance(share, nn.Module):
        held = {name: each.detach().clone() for name, each in share.named_parameters()}
    found: dict[str, Any] = {"parameters": [None] * dist.get_world_size()}
    dist.all_gather_object(found["parameters"], held)
    if not isinstance(share, nn.Module):
        return found
    mine = (x if which == "column" else x.chunk(TP, dim=-1)[place]).clone().requires_grad_()
    try:
        with CommunicationCounter(mesh) as forward:
            output = share(mine)
    except RuntimeError as error:
        return found | {"error": error_text(error).splitlines()[0]}
    found |= {"output": output, "forward": sum(forward.along["tp"].counts.values())}
    wanted = gradient.chunk(TP, dim=-1)[place] if which == "column" else gradient
    if not isinstance(output, Tensor) or output.shape != wanted.shape:
        return found | {"output": output if isinstance(output, Tensor) else type(output).__name__}
    with CommunicationCounter(mesh) as backward:
        output.backward(wanted.clone())
    found["gradients"] = {name: each.grad for name, each in share.named_parameters()}
    return found | {"grad": mine.grad, "backward": sum(backward.along["tp"].counts.values())}


def whole_layer(which: str, line: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer of ``LAYERS``, equal on all ranks; a line's whole input and the whole output's
    gradient.
    """
    inputs, outputs = LAYER_SHAPES[which]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Linear(inputs, outputs)
    draw = torch.Generator().manual_seed(line)
    return layer, torch.randn(3, inputs, generator=draw), torch.randn(3, outputs, generator=draw)


def run_plan(answer: Callable[[], Any], mesh: DeviceMesh, model: str) -> dict[str, Any]:
    """Train one step with the plan that the answer gives for a model; FSDP shards what each rank
    holds.

    Returns:
        ``data``, this rank's place along that axis; ``held``, numbers of each parameter along tp,
        before FSDP; then ``output``, ``gradients`` as a whole by parameter, ``sent``, collectives
        along tp by name, and ``between``, shapes of what leaves each module on this rank, as far as
        the model runs; ``error``, what stopped it, and ``entered``, the layer that was called last,
        the features that it got and those of the whole.

    Raises:
        Wrong: the answer gives no plan for this model.
    """
    cut, plan, place = make_exercise_model(model), answer(), mesh["data"].get_local_rank()
    check_plan_form(plan, cut)
    line = cut.get_input(CPU, seed=place)
    found: dict[str, Any] = {"data": place, "entered": [], "between": {}}
    for name, module in cut.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(input_hook(found, name))
    try:
        parallel.parallelize_module(cut, mesh["tp"], plan)
        for name, module in cut.named_modules():
            module.register_forward_hook(output_hook(found["between"], name))
        found["held"] = {
            name: local_part(parameter).numel() for name, parameter in cut.named_parameters()
        }
        fully_shard(cut, mesh=mesh["data"])
        with CommunicationCounter(mesh) as counter:
            output = local_part(cut(*line))
            found["output"] = output.detach().clone()
            cut.get_loss(line, output).backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError) as error:
        return found | {"error": error_text(error).splitlines()[0]}
    gradients: dict[str, Any] = {name: each.grad for name, each in cut.named_parameters()}
    for name, gradient in gradients.items():
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found | {"gradients": gradients, "sent": dict(counter.along["tp"].counts)}


def input_hook(found: dict[str, Any], name: str) -> Callable[..., None]:
    """A hook that notes which layer is called, and how many features it is given."""

    def note_input(module: nn.Linear, inputs: tuple[Any, ...]) -> None:
        found["entered"] = [name, local_part(inputs[0]).shape[-1], module.in_features]

    return note_input


def output_hook(shapes: dict[str, list[int]], name: str) -> Callable[..., None]:
    """A hook that notes the shape of what leaves a module on this rank."""

    def note_output(module: nn.Module, inputs: Any, output: Any) -> None:
        shapes[name] = [*local_part(output).shape]

    return note_output


def make_exercise_model(name: str) -> LabModel:
    """The model that a plan is for, equal every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_plan_form(plan: Any, model: nn.Module) -> None:
    """Raise Wrong unless this is a dict from names of layers to ways to cut them."""
    if not isinstance(plan, dict):
        raise WrongAnswer(
            f"the plan is {value_text(plan)}, not a dict such as {{'up': ColwiseParallel()}}"
        )
    there = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    ]
    for name, style in plan.items():
        if name not in there:
            raise WrongAnswer(f"there is no layer {value_text(name)}: there are {', '.join(there)}")
        if not isinstance(style, parallel.ParallelStyle):
            raise WrongAnswer(
                f"{name} is to be {value_text(style)}: write ColwiseParallel() or RowwiseParallel()"
            )
