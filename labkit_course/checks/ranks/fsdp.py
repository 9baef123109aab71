"""Run a learner's functions that shard a small model, or average gradients around local experts."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from labkit.models.moe import MixtureOfExperts
from labkit.parallel.safe_checkpoint import METADATA_FILE
from labkit.parallel.small_fsdp import flatten_tensors, gather_and_free, shard_parameters
from labkit.session.counted_group import GroupTraffic

WIDTH, INNER, ROWS, RATE = 4, (5, 4), 3, 0.1
# Ranks that share the parameters of a language model, and its sizes, which they divide.
GROUP, WORDS, FEATURES, BLOCKS, TOKENS = 2, 12, 8, 3, 6
# Blocks to make units of, and the bytes of parameters that a unit may gather. Four of the smallest
# have exactly so many, and the widest has more. 2 and 3 ranks share every parameter evenly.
BLOCK_WIDTH, BLOCK_INNER, UNIT_LIMIT = 6, (6, 6, 6, 6, 30, 12, 18, 12, 6, 18), 1344


def run_answer(
    answer: Callable[..., Any], what: str = "experts", folder: str = ""
) -> dict[str, Any]:
    """Return results of ``run_sharding`` for "shard", of ``run_units`` for "gather" or "reduce".

    For "wrap" they are those of ``run_wrapping``, for "units" those of ``run_grouping``, for
    "save" and "load" those of ``run_saving`` and ``run_loading``.

    For "experts" return the ``gradients`` that the answer leaves, and calls and bytes ``sent``, by
    collective.
    """
    if what == "shard":
        return run_sharding(answer)
    if what in ("gather", "reduce"):
        return run_units(answer, what)
    if what == "wrap":
        return run_wrapping(answer)
    if what == "units":
        return run_grouping(answer)
    if what == "save":
        return run_saving(answer, folder)
    if what == "load":
        return run_loading(answer, folder)
    model = make_expert_model(dist.get_rank())
    parameters = dict(model.named_parameters())
    experts = {parameters[name] for name in expert_names(model)}
    with GroupTraffic() as traffic:
        answer(model, experts, dist.get_world_size())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {"gradients": gradients, "sent": traffic.totals()}


def run_sharding(answer: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Let the answer cut two units, and return, for each, what it gave and left.

    They are ``returned``, the names of types, and if these are right ``shards``, ``shapes`` of the
    rows, bytes of full parameters ``held``, and parameters once the row was ``refilled``.
    """
    found: dict[str, Any] = {
        name: [] for name in ("returned", "shards", "shapes", "held", "refilled")
    }
    for unit, whole in zip(two_units(), two_units(), strict=True):
        given = answer(unit)
        parts = given if isinstance(given, tuple | list) else [given]
        kinds = [type(each).__name__ for each in parts]
        found["returned"].append(", ".join(kinds))
        if kinds != ["Parameter", "Tensor"]:
            return found
        shard, full = parts
        # Memory that is gone cannot be read.
        found["shared"] = shard.untyped_storage()._cdata == full.untyped_storage()._cdata
        if found["shared"]:
            return found
        found["shards"].append(shard.detach().clone())
        found["shapes"].append(full.shape)
        found["held"].append(storage_bytes(unit))
        row = flatten_tensors([each.detach() for each in whole.parameters()], dist.get_world_size())
        if full.shape == row.shape:
            full.untyped_storage().resize_(row.nbytes)
            full.copy_(row)
            found["refilled"].append([each.detach().clone() for each in unit.parameters()])
    return found


def run_units(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Let the answer add its hooks to two units that labkit has cut, and train.

    With "gather" the shards change between two steps, and gradients stay whole; with "reduce"
    labkit gathers, and the shards are trained. Return ``outputs`` of both steps, ``gradients`` of
    the first and of the second, ``again``, calls and bytes ``sent`` in the first, and per unit
    bytes of full parameters ``held`` by moment and of full gradients ``left`` after it, and the
    names of all-gathers that autograd ``recorded``. If a hook failed because gradients were
    missing, return only ``early``: the step, and how many of a unit's gradients were there, of how
    many.
    """
    warnings.filterwarnings("ignore", message=".*is deprecated")
    units, (inputs, targets) = two_units(), rank_batch(dist.get_rank())
    shards, held = [], {}
    for unit in units:
        shard, full = shard_parameters(unit)
        if what == "reduce":
            gather_and_free(unit, shard, full)
        answer(unit, shard, full)
        shards.append(shard)

    def note_first_unit(*_: Any) -> None:
        held["forward"] = [storage_bytes(units[0])]

    units[1].register_forward_pre_hook(note_first_unit)
    model = nn.Sequential(*units)
    with GroupTraffic() as traffic, note_recorded_gathers() as recorded:
        output = model(inputs)
        early = _run_backward(1, what, output, targets, units)
    if early:
        return {"early": early}
    held["after"] = [storage_bytes(unit) for unit in units]
    left = [sum(p.grad.nbytes for p in unit.parameters() if p.grad is not None) for unit in units]
    gradients = _take_gradients(what, units, shards)
    with torch.no_grad():
        for shard, gradient in zip(shards, gradients, strict=True):
            if what == "gather":
                shard.add_(1)
            elif gradient is not None:
                shard.sub_(RATE * gradient)
    second = model(inputs)
    early = _run_backward(2, what, second, targets, units)
    if early:
        return {"early": early}
    outputs = [output.detach(), second.detach()]
    found = {"outputs": outputs, "gradients": gradients, "held": held, "left": left}
    found["recorded"] = recorded
    return found | {"again": _take_gradients(what, units, shards), "sent": traffic.totals()}


def _run_backward(
    step: int, what: str, output: Tensor, targets: Tensor, units: list[nn.Sequential]
) -> list[int]:
    """Run a backward pass; return step, gradients and parameters of a unit reduced too early."""
    try:
        (output - targets).square().mean().backward()
    except Exception:
        for unit in reversed(units):
            parameters = [*unit.parameters()]
            ready = sum(parameter.grad is not None for parameter in parameters)
            # A hook that reduces before the last gradient finds None in the place of the others.
            if what == "reduce" and 0 < ready < len(parameters):
                return [step, ready, len(parameters)]
        raise
    return []


@contextlib.contextmanager
def note_recorded_gathers() -> Iterator[list[str]]:
    """List the all-gathers whose input autograd would follow.

    Gloo then refuses to fill the buffer. The group that counts calls does not, so it must be seen
    here.
    """
    found: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            tensors = [each for each in (*values, *named.values()) if isinstance(each, Tensor)]
            if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
                found.append(name)
            return function(*values, **named)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_gather_into_tensor", "all_gather"):
            patched = noting(name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, patched))
        yield found


def _take_gradients(
    what: str, units: list[nn.Sequential], shards: list[nn.Parameter]
) -> list[Tensor | None]:
    """Return and forget the shards' gradients, or with "gather" those of each unit, flat."""
    if what == "reduce":
        taken = [None if shard.grad is None else shard.grad.clone() for shard in shards]
    else:
        whole = [[p.grad for p in unit.parameters() if p.grad is not None] for unit in units]
        ranks = dist.get_world_size()
        taken = [flatten_tensors(each, ranks) if each else None for each in whole]
    for parameter in [*shards, *(p for unit in units for p in unit.parameters())]:
        parameter.grad = None
    return taken


class SmallLanguageModel(nn.Module):
    """Token ids [N, S] to logits [N, S, words]; the head has the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WORDS, FEATURES)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(FEATURES, wide), nn.GELU(), nn.Linear(wide, FEATURES))
                for wide in itertools.islice(itertools.cycle((16, 24)), BLOCKS)
            )
            self.norm = nn.LayerNorm(FEATURES)
            self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        features = self.embedding(ids)
        for block in self.blocks:
            features = features + block(features)
        logits: Tensor = self.head(self.norm(features))
        return logits


def language_model_gradients(model: nn.Module, index: int) -> dict[str, Tensor]:
    """Run both passes on a rank's own tokens, and return the gradients by name, where there are."""
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(index))
    logits = model(ids)[:, :-1].float()
    functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_wrapping(answer: Callable[[nn.Module, int], Any]) -> dict[str, Any]:
    """Let the answer wrap a language model, and train a step.

    Return the names of parameters that are ``whole`` and, if there are none, by name the elements
    ``kept`` and their ``dtypes``, the ``group`` that shares a parameter, and whole ``gradients``.
    Calls and bytes ``sent`` are by axis of the mesh, "shard" or "replicate", and collective.
    """
    # Deprecated names are torch's own, and no block's output is changed in place.
    warnings.filterwarnings("ignore", message=".*(is deprecated|returned a view tensor)")
    model = SmallLanguageModel()
    answer(model, GROUP)
    parameters = dict(model.named_parameters())
    sharded = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
    if whole := [name for name in parameters if name not in sharded]:
        return {"whole": whole}
    found: dict[str, Any] = {"whole": [], "kept": {}, "dtypes": {}}
    for name, parameter in sharded.items():
        found["kept"][name] = parameter.to_local().numel()
        found["dtypes"][name] = str(parameter.dtype)
    mesh = sharded["norm.weight"].device_mesh
    found["group"] = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    axes = {str(mesh.get_group(dim).group_name): "replicate" for dim in range(mesh.ndim)}
    axes[str(mesh.get_group(mesh.ndim - 1).group_name)] = "shard"
    with GroupTraffic() as traffic:
        gradients = language_model_gradients(model, dist.get_rank())
    found["gradients"] = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in gradients.items()
    }
    found["sent"] = {
        f"{axis}/{name}": each
        for group, axis in axes.items()
        for name, each in traffic.totals(group).items()
    }
    return found


def run_grouping(answer: Callable[[list[nn.Module], Any, int], Any]) -> dict[str, Any]:
    """Let the answer make units of blocks, and train one step.

    Return the blocks that it ``left`` out and, if there are none, the ``sizes`` of the blocks in
    bytes, the ``limit`` of a unit, bytes ``gathered`` by each all-gather of the forward pass, calls
    and bytes ``sent`` by the whole step, and the ``output`` beside one device's, ``right``.
    """
    warnings.filterwarnings("ignore", message=".*(is deprecated|returned a view tensor)")
    ranks = dist.get_world_size()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(BLOCK_WIDTH, inner), nn.Linear(inner, BLOCK_WIDTH))
                for inner in BLOCK_INNER
            )
        )
    inputs, mesh = torch.ones(ROWS, BLOCK_WIDTH), init_device_mesh("cpu", (ranks,))
    sizes = [sum(p.nbytes for p in block.parameters()) for block in model]
    right = model(inputs).detach()
    answer([*model], mesh, UNIT_LIMIT)
    sharded = [all(isinstance(p, DTensor) for p in block.parameters()) for block in model]
    if left := [place for place, whole in enumerate(sharded) if not whole]:
        return {"left": left}
    fully_shard(model, mesh=mesh)
    with GroupTraffic() as traffic:
        output = model(inputs)
        forward = [call.bytes * ranks for call in traffic.calls() if call.name == "all_gather"]
        output.sum().backward()
    found = {"left": [], "sizes": sizes, "limit": UNIT_LIMIT, "gathered": forward}
    return found | {"sent": traffic.totals(), "output": output.detach(), "right": right}


def training_model(seed: int) -> nn.Sequential:
    """Return a model on one device whose rows not every number of ranks divides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 4))


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train on the same samples on every rank, and return the losses."""
    samples, losses = torch.arange(24.0).view(3, 8) / 10, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(samples) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_adam(model: nn.Module) -> torch.optim.Adam:
    """Return an optimizer that has not stepped yet."""
    return torch.optim.Adam(model.parameters(), lr=RATE)


def train_alone() -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Return parameters after two steps on one device, the next losses, and those of a new Adam."""
    model = training_model(0)
    optimizer = new_adam(model)
    train_steps(model, optimizer, 2)
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    forgetful = copy.deepcopy(model)
    return (
        parameters,
        train_steps(model, optimizer, 3),
        train_steps(forgetful, new_adam(forgetful), 3),
    )


def start_sharded_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that all ranks share, and its optimizer."""
    model = training_model(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, new_adam(model)


def run_saving(save: Callable[..., Any], folder: str) -> dict[str, Any]:
    """Train two steps and let the answer save; return the bytes of the ``files`` in the folder."""
    model, optimizer = start_sharded_training(0)
    train_steps(model, optimizer, 2)
    save(model, optimizer, folder)
    dist.barrier()
    found = [each for each in sorted(Path(folder).rglob("*")) if each.is_file()]
    # The table of contents is small, and of all ranks.
    return {"files": {e.name: e.stat().st_size for e in found if e.name != METADATA_FILE}}


def run_loading(load: Callable[..., Any], folder: str) -> dict[str, Any]:
    """Let the answer load; return whole ``parameters``, and the ``losses`` of three more steps."""
    model, optimizer = start_sharded_training(1)
    try:
        load(model, optimizer, folder)
    except CheckpointException as error:
        # It is no Exception, and its text holds the tracebacks of all ranks.
        reason, _ = next(iter(error.failures.values()))
        raise RuntimeError(str(reason)) from None
    parameters = {
        name: each.full_tensor().clone() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in model.named_parameters()
    }
    plain = {name: each.detach() for name, each in parameters.items()}
    return {"parameters": plain, "losses": train_steps(model, optimizer, 3)}


def storage_bytes(unit: nn.Module) -> int:
    """Return the bytes of memory behind a unit's parameters."""
    memory = [parameter.untyped_storage() for parameter in unit.parameters()]
    # Parameters that are views of one flat tensor share a storage, which counts once.
    return sum({each._cdata: each.nbytes() for each in memory}.values())


class LastFirst(nn.Sequential):
    """Modules that compute in the reverse order of their registration."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the modules, the last one first."""
        for module in reversed(self):
            inputs = module(inputs)
        return inputs


def two_units() -> list[nn.Sequential]:
    """Return two units, equal on all ranks, of 49 and 40 elements.

    2 and 3 ranks need padding for the first, and 2 ranks need none for the second. The first
    computes in the order of its parameters, the second in the reverse order.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = (
            (nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH)) for inner in INNER
        )
        return [nn.Sequential(*first), LastFirst(*second)]


def rank_batch(index: int) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets."""
    draw = torch.Generator().manual_seed(index)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def make_expert_model(index: int) -> MixtureOfExperts:
    """Return a rank's model after one backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtureOfExperts(expert_seed=index)
    inputs = model.get_input(torch.device("cpu"), seed=index)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    return model


def gradients_by_name(model: MixtureOfExperts) -> dict[str, Tensor]:
    """Return a model's gradients by the names of its parameters."""
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {name: each for name, each in gradients.items() if each is not None}


def expert_names(model: MixtureOfExperts) -> list[str]:
    """Return the names of the parameters that differ between ranks."""
    own = {parameter for module in model.local_modules() for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter in own]
