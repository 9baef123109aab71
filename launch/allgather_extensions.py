"""Train with parameters that decide what FSDP's all-gather sends.

    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --extension int8
    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --check parity
    torchrun --standalone --nproc-per-node 2 -m launch.allgather_extensions --check loss --steps 60

The model learns from which region of a photo a tile was cut. The optimizer's shards stay float32:
only what a unit gathers before it computes is rounded, or sent twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from labkit import rank, requirements, tensors
from labkit.config import NonNegativeFloat, PositiveInt
from labkit.models.tile_network import tile_batch, tile_network
from labkit.parallel.compiling import apply_compile
from labkit.parallel.extensions import ExtensionChoice, apply_extension
from labkit.parallel.fsdp import enable_prefetch
from labkit.parity import extensions as parity
from labkit.parity import sample_seed
from labkit.theory.extensions import FINAL_STEPS, SCALE_GRANULARITY

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Config:
    """What is sent, and what is measured or checked."""

    extension: Literal[
        "none", "two_tensor", "fp32", "bf16", "float8", "int8", "int4", "yours", "your_hooks",
        "your_type",
    ] = "two_tensor"  # fmt: skip
    """What a parameter sends: none, what FSDP2 sends by itself; two_tensor, the parameter twice; a
    type, its elements in that type; yours, what encode of use= returns; your_hooks, what the hooks
    send that add_hooks of use= puts onto a shard; your_type, what the type sends that parameter of
    use= makes of it.
    """
    scales: Literal["", "shard", "row", "group"] = ""
    """What has a scale of its own, with float8, int8 or int4: a shard, a row, or a group of 32
    elements of a row. By default float8 has one per shard, int8 and int4 one per row.
    """
    policy: Literal["fp32", "bf16"] = "fp32"
    """What a unit computes in (its MixedPrecisionPolicy); gradients are reduced in float32."""
    check: Literal["none", "parity", "meta", "wire", "loss"] = "none"
    """parity: equal to plain training; meta: start from the meta device, with nothing left unset;
    wire, loss: bytes and final loss of each extension.
    """
    dim: PositiveInt = 128
    """Width of the network."""
    batch: PositiveInt = 64
    """Tiles per rank in a step."""
    steps: PositiveInt = 10
    """Timed steps, after one to warm up; with parity or meta, compared or trained steps."""
    weights: str = ""
    """Initial weights: a file with this network's state_dict from torch.save; random by default."""
    learning_rate: NonNegativeFloat = 1e-3
    """Adam's, at the first step; 0 leaves the weights as they are."""
    reshard_after_forward: bool = True
    """Free a unit's parameters after its forward pass and gather them again; parity does both."""
    prefetch: bool = False
    """Gather a unit's parameters while the unit before it computes."""
    compile: bool = False
    """Compile each layer with inductor."""

    def validate(self, world_size: int) -> None:
        extension, check = self.extension, self.check
        if world_size < 2:
            raise ValueError("extensions need at least 2 ranks: with 1 FSDP2 gathers nothing")
        if self.compile and check in ("parity", "meta"):
            raise ValueError(f"check {check} trains models that are not compiled: no compile")
        if self.compile:
            requirements.refuse_without_compiler()
        if self.scales and extension not in SCALE_GRANULARITY:
            known = " or ".join(SCALE_GRANULARITY)
            raise ValueError(f"extension {extension} has no scales to choose: take {known}")
        if self.weights and not Path(self.weights).is_file():
            raise ValueError(f"weights {self.weights!r} is no file: give what torch.save wrote")
        if check == "parity" and extension in ("bf16", "float8", "int8", "int4"):
            raise ValueError(f"extension {extension} rounds: only two_tensor and fp32 can be equal")
        if check != "none" and self.policy != "fp32":
            rule = f"policy {self.policy} is for a measured run"
            raise ValueError(f"{rule}: check {check} has a policy of its own")
        if check == "wire" and self.dim < 128:
            rule = "a row of fewer than 128 numbers does not make up for its scale"
            raise ValueError(f"dim {self.dim}: {rule}")
        if check in ("parity", "meta") and extension == "your_hooks":
            rule = f"check {check} makes its own shards, which your_hooks does not reach"
            raise ValueError(f"{rule}: take your_type, or yours with check parity")
        if check == "parity" and self.steps < 3:
            rule = f"steps {self.steps}: the third is the first that sets gradients to zero"
            raise ValueError(f"{rule}: take 3 or more")
        if check == "meta" and self.steps < 2:
            rule = f"steps {self.steps}: check meta holds the last loss against the first"
            raise ValueError(f"{rule}: take 2 or more")
        if check == "loss" and self.steps < 2 * FINAL_STEPS:
            rule = f"steps {self.steps}: the final loss is a mean over {FINAL_STEPS}"
            raise ValueError(f"{rule}: take {2 * FINAL_STEPS}")


@rank.replaceable
def encode(shard: Tensor) -> tuple[Tensor, ...]:
    """Return what to send of this rank's padded rows: contiguous tensors [rows, ...]."""
    return (shard,)


@rank.replaceable
def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the parameter [rows of all ranks, ...] in this dtype, from the gathered tensors."""
    return gathered[0].to(dtype)


@rank.replaceable
def add_hooks(shard: Tensor, rows: int) -> None:
    """Put FSDP2's two hooks onto a plain shard, of which every rank sends this many rows."""
    raise ValueError("extension your_hooks needs use={'add_hooks': a function of (shard, rows)}")


@rank.replaceable
def parameter(weight: Tensor) -> Tensor:
    """Convert a weight, before it is sharded, to a tensor type with FSDP2's two hooks."""
    return tensors.make_two_tensor(weight)


def resolve_extension(extension: str, scales: str = "") -> ExtensionChoice:
    """Return the extension that the names of Config stand for."""
    # Of all choices of scales, EXTENSIONS has only the defaults.
    if scales or extension == "int4":
        return tensors.make_quantised_extension(extension, scales)
    if extension == "yours":
        # A small shard shows how many tensors a learner's encode returns.
        sent = len(encode(torch.zeros(2, 2)))
        return tensors.Extension(tuple(f"tensor {index}" for index in range(sent)), encode, decode)
    return parameter if extension == "your_type" else tensors.EXTENSIONS.get(extension, extension)


def main(config: Config) -> None:
    """Train and measure, or check."""
    with rank.session() as here:
        mesh = here.mesh(data=here.world_size)
        network = partial(build_sharded_network, config, here, mesh)
        if config.check == "none":
            model = network(config.extension)
            train(config, here, model, here.steps)
            record_gather_costs(config, here, model)
        elif config.check == "wire":
            step = partial(forward_backward, config, here, 0)
            reshard = config.reshard_after_forward
            here.finish_check(**parity.compare_bytes(mesh, network, step, reshard))
        elif config.check == "loss":
            losses = partial(train, config, here, measure=here.plain_steps)
            verdict = parity.compare_final_losses(mesh, lambda name: losses(network(name)))
            here.finish_check(**verdict)
        else:
            meta = config.check == "meta"
            compare = parity.train_from_meta_device if meta else parity.compare_extension_training
            extension = resolve_extension(config.extension, config.scales)
            here.finish_check(**compare(mesh, here.device, extension, config.steps))


def build_sharded_network(
    config: Config, here: rank.Session, mesh: DeviceMesh, extension: str
) -> nn.Sequential:
    """Build the sharded network; its weights are equal for all extensions."""
    model = build_whole_network(config, here.device)
    # Before FSDP, whose hooks stay outside of the compiled code.
    if config.compile:
        apply_compile(model, ("Linear", "MLP"))
    else:
        here.emulate_units(layer for layer in model if list(layer.parameters()))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.policy], reduce_dtype=torch.float32)
    # A check builds other extensions too, for which the choice of scales was not meant.
    scales = config.scales if extension == config.extension else ""
    reshard = config.reshard_after_forward
    with_hooks = extension == "your_hooks"
    named = "none" if with_hooks else extension
    chosen = with_emulated_memory(here, resolve_extension(named, scales))
    apply_extension(model, mesh, chosen, reshard_after_forward=reshard, mp_policy=policy)
    if with_hooks:
        tensors.hook_shards(model, partial(add_emulated_hooks, here))
    if config.prefetch:
        layers = [layer for layer in model if list(layer.parameters())]
        enable_prefetch(model, {str(index): [layer] for index, layer in enumerate(layers)})
    return model


def add_emulated_hooks(here: rank.Session, shard: Tensor, rows: int) -> None:
    """Let a learner's hooks take the time of an emulated device's memory."""
    add_hooks(shard, rows)
    hooked: Any = shard
    encode_shard, decode_gathered = hooked.fsdp_pre_all_gather, hooked.fsdp_post_all_gather

    def pre_all_gather(mesh: DeviceMesh) -> Any:
        sent, metadata = encode_shard(mesh)
        here.emulate_memory(shard, *sent)
        return sent, metadata

    def post_all_gather(gathered: Sequence[Tensor], *given: Any, out: Tensor | None = None) -> Any:
        answer = decode_gathered(gathered, *given, out=out)
        here.emulate_memory(*gathered, answer[0] if out is None else out)
        return answer

    hooked.fsdp_pre_all_gather, hooked.fsdp_post_all_gather = pre_all_gather, post_all_gather


def with_emulated_memory(here: rank.Session, extension: ExtensionChoice) -> ExtensionChoice:
    """Let encoding and decoding take the time of an emulated device's memory."""
    if not isinstance(extension, tensors.Extension):
        return extension

    def encode(shard: Tensor) -> tuple[Tensor, ...]:
        sent = extension.encode(shard)
        here.emulate_memory(shard, *sent)
        return sent

    def decode(gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        whole = extension.decode(gathered, dtype)
        here.emulate_memory(*gathered, whole)
        return whole

    return replace(extension, encode=encode, decode=decode)


def build_whole_network(config: Config, device: torch.device) -> nn.Sequential:
    """Build the network unsharded, equal on all ranks."""
    torch.manual_seed(0)
    model = tile_network(config.dim)
    if config.weights:
        model.load_state_dict(torch.load(config.weights, weights_only=True))
    return model.to(device)


def tile_loss(config: Config, here: rank.Session, index: int, model: nn.Module) -> Tensor:
    """Return the loss of this rank's tiles of one step."""
    images, labels = tile_batch(config.batch, sample_seed(index, here.rank))
    return cross_entropy(model(images.to(here.device)).float(), labels.to(here.device))


def forward_backward(config: Config, here: rank.Session, index: int, model: nn.Module) -> Tensor:
    """Run forward and backward pass on this rank's tiles of one step; return the loss."""
    loss = tile_loss(config, here, index, model)
    loss.backward()
    # With two_tensor the loss is a pair, too.
    return tensors.plain_tensors(loss.detach())[0]


def train(
    config: Config, here: rank.Session, model: nn.Module, measure: rank.StepLoop
) -> list[Tensor]:
    """Train on the photo, record each step's loss, and return this rank's losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, foreach=True)
    # The learning rate falls to 0, or the final loss would depend on the last few steps.
    slower = LinearLR(optimizer, 1.0, 0.0, total_iters=config.steps)
    losses: list[Tensor] = []
    for index, step in enumerate(measure(config.steps, track=[model, optimizer])):
        optimizer.zero_grad()
        with step.span("forward_backward"):
            losses.append(forward_backward(config, here, index, model))
        with step.span("optimizer"):
            optimizer.step()
        slower.step()
        step.record_scalar("loss", losses[-1])
    tensors.refuse_leak(model)
    return losses


@torch.no_grad()
def record_gather_costs(config: Config, here: rank.Session, model: nn.Module) -> None:
    """Record the errors, loss change, memory and time of gathering. A collective."""
    here.record_scalar("held_bytes", tensors.gather_memory_bytes(model))
    # Simulated tensors have a size, but no values and no time.
    if not here.tensors_have_values:
        return
    errors = tensors.gather_errors(model)
    # The same weights, not rounded by a gather.
    exact = build_whole_network(config, here.device)
    for own, each in zip(exact.parameters(), model.parameters(), strict=True):
        own.copy_(tensors.plain_tensors(each.full_tensor().clone())[0])  # type: ignore[attr-defined]
    # Tiles of a step after the last, which neither model has seen.
    losses = (tile_loss(config, here, config.steps, network) for network in (model, exact))
    rounded, right = (tensors.plain_tensors(loss)[0] for loss in losses)
    # What ranks wait for takes the same time in each round.
    how = {"rounds": 1} if here.is_emulated else {}
    taken, within_hooks = tensors.gather_ms(model, **how)
    here.record_scalar("weight_error", errors.largest)
    here.record_scalar("weight_rms_error", errors.rms)
    here.record_scalar("loss_change", float(rounded / right - 1))
    here.record_scalar("gather_ms", taken)
    here.record_scalar("hooks_ms", within_hooks)


if __name__ == "__main__":
    rank.run_main(main, Config)
