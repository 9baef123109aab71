"""On a rank: a small FSDP2 model gathers with a learner's functions and trains a few steps.

The notebook's process trains the same model on one device: it imports what both need from here.
"""

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
from labkit.checks.judge import WrongAnswer, answer_name
from labkit.models.protocol import random_normal
from labkit.session.traffic import CommunicationCounter
from labkit.tensors import Extension, TwoTensor
from labkit.torch_private import unsafe_preserve_version_counter

Hook = Callable[..., Any]
STEPS, BATCH, LEARNING_RATE = 3, 4, 1e-2
HOOK_WIDTHS = (
    64,
    51,
    80,
    33,
)  # weights [51, 64], [80, 51], [33, 80]: two of them do not divide by 2
CODEC_WIDTHS = (
    128,
    128,
    128,
    129,
)  # rows long enough to have a scale each, of even length; the last are padded
BOTH_DTYPES = (torch.float32, torch.bfloat16)
HOOK_DTYPES = {"two_tensor": (torch.float32,), "cast": BOTH_DTYPES, "int8": BOTH_DTYPES}
"""For each kind of hook, the dtypes to compute in."""


def run_answer(*answers: Hook, what: str) -> dict[str, Any]:
    """Train with a post-all-gather hook, or with an encode and a decode.

    ``what`` is "two_tensor" for a hook of that type, "cast" for one that can cast, "int8" for a
    hook without ``self`` of plain parameters, "codec" for an encode and a decode.

    Returns:
        Of a hook, by dtype: ``losses`` of each step, and ``left``, bytes of full parameters that
        stay in memory, by name. Of a codec, see ``try_codec``.

    Raises:
        Wrong: FSDP2 could not use what an answer gives.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "codec":
        return run_codec(mesh, *answers)
    found = {}
    for dtype in HOOK_DTYPES[what]:
        model = make_hook_model(mesh, what, dtype, *answers)
        losses = train_steps(model, STEPS)
        found[str(dtype).removeprefix("torch.")] = {
            "losses": losses,
            "left": tensors.leak_bytes(model),
        }
    return found


def run_codec(mesh: DeviceMesh, encode: Hook, decode: Hook) -> dict[str, Any]:
    """``weights`` as they were gathered before training, by name; then the ``loss`` and ``sent``
    bytes of a step.
    """
    model = make_codec_model()
    sent = encode(next(model.parameters()).detach().clone())
    if not isinstance(sent, tuple) or not all(isinstance(tensor, Tensor) for tensor in sent):
        raise WrongAnswer(
            f"{answer_name(encode)} gave {type(sent).__name__}, not a tuple of tensors"
        )
    shard_layers(model, mesh, torch.float32)
    tensors.extend_model(model, Extension(("tensor",) * len(sent), encode, decode))
    weights: dict[str, Any] = {}
    unit: Any  # a linear layer that fully_shard has made an FSDPModule, too
    for name, unit in model.named_children():
        unit.unshard()
        weights[name] = unit.weight.detach().clone()
        unit.reshard()
    with CommunicationCounter() as counter:
        losses = train_steps(model, steps=1)
    return {"weights": weights, "loss": losses[0][0], "sent": counter.bytes["all_gather"]}


def make_linear_stack(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers without bias, equal everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))


@torch.no_grad()
def make_codec_model() -> nn.Sequential:
    """Weights that differ much in size, and a row of zeros."""
    model = make_linear_stack(CODEC_WIDTHS)
    first, second, third = model.parameters()
    first[0] = 0
    second.mul_(1e-4)
    third[: len(third) // 2].mul_(3)
    return model


def sample_inputs(step: int, width: int) -> Tensor:
    """[BATCH, width], the same everywhere."""
    return random_normal(BATCH, width, device=torch.device("cpu"), seed=step)


def shard_layers(model: nn.Sequential, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    """Make each layer a unit that computes in a dtype."""
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model


def make_hook_model(mesh: DeviceMesh, what: str, dtype: torch.dtype, hook: Hook) -> nn.Sequential:
    """A sharded model with a hook of its own: of int8 and scales, or of TwoTensors, the second half
    twice the first.
    """
    model = make_linear_stack(HOOK_WIDTHS)
    if what == "int8":
        watched = check_hook(hook, Tensor)
        tensors.extend_model(shard_layers(model, mesh, dtype), "int8")
        for parameter in model.parameters():
            parameter._local_tensor.fsdp_post_all_gather = watched  # type: ignore[attr-defined]  # see tensors.extend
        return model
    kind = type("Answered", (TwoTensor,), {"fsdp_post_all_gather": hook_method(hook)})
    tensors.convert_parameters(model, lambda weight: kind(weight, 2 * weight))
    return shard_layers(model, mesh, dtype)


def hook_method(hook: Hook) -> Hook:
    """The hook as a method of a TwoTensor, looked at."""

    def post_all_gather(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return check_hook(partial(hook, self), TwoTensor)(*args, **kwargs)

    return post_all_gather


def check_hook(hook: Hook, kind: type[Tensor]) -> Hook:
    """A post-all-gather hook whose answers are looked at; raises Wrong for one that FSDP2 could not
    use.
    """

    def post_all_gather(
        gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            answer = hook(gathered, metadata, dtype)
            check_first_call(answer, gathered, dtype, kind)
            return answer
        if not storage_pointers([out]) & storage_pointers(
            gathered
        ):  # just allocated again: the old values may happen to lie there
            with torch.no_grad(), unsafe_preserve_version_counter(out):
                for plain in tensors.plain_tensors(out):
                    plain.fill_(torch.nan)
        return hook(gathered, metadata, dtype, out=out)

    return post_all_gather


def check_first_call(
    answer: Any, gathered: Sequence[Tensor], dtype: torch.dtype, kind: type[Tensor]
) -> None:
    """Raise Wrong unless this is what a hook must return on the first call."""
    first, parts = "on the first call the", answer if isinstance(answer, tuple) else (answer,)
    if answer is not parts or len(parts) != 2 or not isinstance(parts[0], kind):
        seen = ", ".join(type(each).__name__ for each in parts)
        raise WrongAnswer(
            f"{first} hook gave {seen}, not two things, a {kind.__name__} and a tuple of the"
            " tensors to free"
        )
    whole, to_free = parts
    if not isinstance(to_free, tuple | list) or not all(
        isinstance(each, Tensor) for each in to_free
    ):
        raise WrongAnswer(
            f"{first} second part of the answer must be a tuple of the tensors to free"
        )
    if whole.shape != gathered[0].shape or whole.dtype != dtype:
        right = f"{tuple(gathered[0].shape)} in {dtype}: all that was gathered, padding included"
        raise WrongAnswer(f"the parameter is {tuple(whole.shape)} in {whole.dtype}, not {right}")
    if all(each.dtype == dtype for each in gathered) and not storage_pointers(
        [whole]
    ) <= storage_pointers(gathered):
        raise WrongAnswer(
            "what was gathered has the right dtype already, and a copy of it needs the memory twice"
        )


def storage_pointers(given: Sequence[Tensor]) -> set[int]:
    """Where the memory of these tensors lies."""
    return {
        plain.untyped_storage().data_ptr()
        for each in given
        for plain in tensors.plain_tensors(each)
    }


def train_steps(model: nn.Sequential, steps: int) -> list[list[Tensor]]:
    """A few steps on samples that all ranks share; of each the loss, both where there are two."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=True)
    width, losses = next(model.parameters()).shape[1], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(sample_inputs(step, width)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(tensors.plain_tensors(loss.detach()))
    return losses
