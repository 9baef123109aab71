"""Train ConvNeXt with its activations sharded along the width (or the height) of the images.

    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial                   # small
    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial --check parity    # correct?
    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial --preset paper    # 4 GPUs

Each rank holds one strip of every image and feature map. A convolution exchanges a few columns with
the neighbouring ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import parity, rank, requirements
from labkit.config import Limits, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from labkit.models import photo
from labkit.models.convnext import ConvNeXt
from labkit.parallel.checkpointing import apply_activation_checkpointing, find_blocks
from labkit.parallel.halo import Strip, pad_columns, return_halo_gradients
from labkit.parallel.small_fsdp import flatten_tensors, split_flat
from labkit.parallel.spatial import apply_spatial, own_samples, shard_batch
from labkit.parity.spatial import compare_spatial_step
from labkit.theory import sizes, spatial

BLOCKS = ("ConvNeXtBlock",)


@dataclass
class Config:
    """What is trained, on what, and how it is sharded."""

    preset: Literal["small", "bench", "paper"] = "small"
    """Defaults for all other options: small runs on any machine, bench is the benchmark's, paper
    needs four GPUs.
    """
    strategy: Literal["plain", "native", "native_unguarded", "dtensor", "local", "yours"] = "local"
    """Who exchanges the halo. plain: one rank, no exchange; native: PyTorch; native_unguarded:
    PyTorch, even where it is wrong; dtensor, local: labkit; yours: local with use=.
    """
    tensor_dim: Literal[2, 3] = 3
    """The dimension of [N, C, H, W] that is cut: 2 is the height, 3 the width."""
    mesh: str = ""
    """Ranks as 4 (all along the image) or 2x2 (data x space, which also cuts the batch)."""
    data: Literal["random", "photo"] = "random"
    """Random images and labels, or tiles of a photo with one of ten regions as label."""
    batch: PositiveInt = 2
    """Images per step, over all ranks."""
    height: PositiveInt = 128
    """Image height in pixels."""
    width: PositiveInt = 256
    """Image width in pixels."""
    num_classes: Annotated[int, Limits(at_least=2)] = 10
    """Outputs of the classifier; the photo needs at least ten."""
    depths: tuple[PositiveInt, ...] = (1, 1)
    """Blocks in each stage."""
    dims: tuple[PositiveInt, ...] = (32, 64)
    """Channels in each stage."""
    drop_path_rate: Annotated[float, Limits(at_least=0, below=1)] = 0.0
    """Stochastic depth of the last block."""
    layer_scale_init_value: NonNegativeFloat = 1e-6
    """Initial value of each block's layer scale; 0 for none."""
    init: Literal["trunc_normal", "ones"] = "trunc_normal"
    """Initial weights. With ones all channels are equal, and the loss is meaningless."""
    checkpointing: bool = False
    """Keep each block's input alone, and compute its activations again in the backward pass."""
    learning_rate: PositiveFloat = 1e-4
    """Adam's learning rate."""
    input_grad: bool = False
    """Compute the gradient of the images too, as PyTorch's example does that paper restates."""
    steps: PositiveInt = 5
    """Timed steps, after one to warm up."""
    seed: NonNegativeInt = 0
    """Seed of weights and images."""
    memory_cap_mib: PositiveInt | None = None
    """End a rank that allocates more MiB than this, counted before the model is built."""
    check: Literal["none", "parity"] = "none"
    """parity: compare the first three steps with one device's instead of measuring."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "bench": {"height": 256, "width": 512, "depths": (2, 2, 2), "dims": (64, 128, 256),
                  "steps": 10},
        "paper": {"batch": 7, "height": 512, "width": 1024, "num_classes": 1000, "steps": 20,
                  "depths": (3, 3, 27, 3), "dims": (256, 512, 1024, 2048), "input_grad": True},
    }  # fmt: skip

    def validate(self, world_size: int) -> None:
        requirements.refuse_native_strategy(self.strategy)
        ranks = sizes.parse_mesh_axes(self.mesh, world_size)
        if self.strategy == "plain" and world_size > 1:
            rule = "strategy plain is one device's training"
            raise ValueError(f"{rule}: it takes 1 rank, not {world_size}")
        if self.strategy == "yours" and (self.tensor_dim != 3 or ranks["space"] != world_size):
            rule = "strategy yours cuts the width over all ranks"
            raise ValueError(f"{rule}: leave tensor_dim at 3 and mesh empty")
        if self.data == "photo" and self.num_classes < 10:
            rule = f"num_classes {self.num_classes} cannot label the photo's ten regions"
            raise ValueError(f"{rule}: take at least 10")
        spatial.check_convnext(self.height, self.width, self.depths, self.dims)
        sizes.even_share(self.batch, ranks.get("data", 1), what="a batch of")
        cut = self.height if self.tensor_dim == 2 else self.width
        spatial.check_strips(cut, ranks["space"], self.depths)
        if self.strategy in ("dtensor", "native_unguarded"):
            spatial.check_equal_strips(cut, ranks["space"], self.tensor_dim)

    def different_ranks(self, world_size: int) -> set[int]:
        """Return both ends of a line, which have one neighbour, and a rank between them."""
        line = sizes.parse_mesh_axes(self.mesh, world_size)["space"]
        return {0, line // 2, line - 1}


@rank.replaceable
def exchange_halo(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Return a strip [N, C, H, W] with ``halo`` columns of each neighbour, zeros at the border."""
    return pad_columns(strip, halo, rank, ranks)


@rank.replaceable
def return_gradients(grad: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Return the strip's gradient; send each halo's part to the rank that owns its columns."""
    return return_halo_gradients(grad, halo, Strip(3, None, rank, ranks))()


@rank.replaceable
def padded_strip(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Call ``exchange_halo``, with ``return_gradients`` as its backward pass."""
    padded: Tensor = _HaloExchange.apply(strip, halo, rank, ranks)
    return padded


class _HaloExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
        # The gradient needs no tensor of the forward pass, so none is saved.
        ctx.place = halo, rank, ranks
        return exchange_halo(strip, halo, rank, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return return_gradients(grads[0], *ctx.place), None, None, None


@rank.replaceable
def reduce_gradients(cut: list[Tensor], head: list[Tensor]) -> None:
    """Make a rank's gradients those of one device, in place; of the head every rank has all."""
    bucket = flatten_tensors(cut, ranks=1)
    dist.all_reduce(bucket)
    for gradient, total in zip(cut, split_flat(bucket, cut), strict=True):
        gradient.copy_(total)


def reduce_with_answer(model: ConvNeXt) -> None:
    """Reduce a model's gradients with the function of ``use=``, for strategy yours."""
    cut: list[Tensor] = []
    head: list[Tensor] = []
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        (head if name.startswith("head.") else cut).append(weight.grad)
    reduce_gradients(cut, head)


def pad_with_answer(strip: Tensor, halo: int, place: Strip) -> Tensor:
    """Pad a strip with the functions of ``use=``, for strategy yours."""
    # Messages must be contiguous, and zeros_like of a slice keeps the strides of channels-last.
    padded = padded_strip(strip.contiguous(), halo, place.rank, place.ranks)
    if padded.requires_grad:
        padded.register_hook(Tensor.contiguous)
    return padded


def main(config: Config) -> None:
    """Train and measure, or compare a few steps with one device's."""
    with rank.session() as here, here.cap_memory(config.memory_cap_mib):
        mesh = here.mesh(**sizes.parse_mesh_axes(config.mesh, here.world_size))
        model = build_model(config, here.device)
        shape = config.batch, config.height, config.width
        images, labels = photo.image_batch(config.data, *shape, config.num_classes, config.seed)
        # [N, 3, H, W] and [N], equal on all ranks
        batch = whole = images.to(here.device), labels.to(here.device)
        checked = config.check == "parity"
        reference = parity.seed_and_copy(model, config.seed) if checked else model
        if config.checkpointing:
            apply_activation_checkpointing(model, BLOCKS)
        here.emulate_units(find_blocks(model, BLOCKS), share=1 / here.world_size)
        # Even one rank takes this way, so that strategies are compared with plain code.
        if config.strategy != "plain":
            pad = pad_with_answer if config.strategy == "yours" else None
            strategy = "local" if config.strategy == "yours" else config.strategy
            how: dict[str, Any] = {"tensor_dim": config.tensor_dim, "pad": pad}
            apply_spatial(model, mesh, strategy=strategy, reduces=pad is None, **how)
            stride = spatial.total_stride(config.depths)
            batch = shard_batch(*whole, mesh, tensor_dim=config.tensor_dim, stride=stride)
        for own_images in (batch[0], whole[0]):
            own_images.requires_grad_(config.input_grad)
        # More than one, so that what a step leaves behind counts; few, as steps carry rounding on.
        few_steps = partial(here.plain_steps, most=3)
        after = reduce_with_answer if config.strategy == "yours" else None
        logits = train(config, few_steps if checked else here.steps, model, *batch, after=after)
        if checked:
            expected = train(config, few_steps, reference, *whole)[own_samples(mesh, config.batch)]
            both = model, logits, reference, expected
            inputs = (batch[0], whole[0]) if config.input_grad else None
            drops = config.drop_path_rate > 0
            here.finish_check(**compare_spatial_step(*both, inputs=inputs, drops_samples=drops))


def build_model(config: Config, device: torch.device) -> ConvNeXt:
    """Build the model, equal on all ranks."""
    torch.manual_seed(config.seed)
    # Channels last is the layout in which CPU and GPU convolve fastest.
    layers = config.depths, config.dims, config.drop_path_rate, config.layer_scale_init_value
    model = ConvNeXt(3, config.num_classes, *layers, init=config.init)
    return model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(
    config: Config,
    measure: rank.StepLoop,
    model: ConvNeXt,
    images: Tensor,
    labels: Tensor,
    after: Callable[[ConvNeXt], None] | None = None,
) -> Tensor:
    """Train in every measured step; return this rank's last logits [N, num_classes].

    ``after`` is called after each backward pass.
    """
    # Both models of a check must drop the same samples.
    torch.manual_seed(config.seed)
    # Adam's first step is nearly the gradient's sign, which rounding decides for gradients near 0.
    epsilon = 1e-8 if config.check == "none" else 1e-3
    parameters, lr = model.parameters(), config.learning_rate
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=epsilon, fused=True)
    for step in measure(config.steps, track=[model, optimizer, images, labels]):
        optimizer.zero_grad()
        images.grad = None
        with step.span("forward"):
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        with step.span("backward"):
            loss.backward()
            if after:
                after(model)
        with step.span("optimizer"):
            optimizer.step()
        step.record_scalar("loss", loss)
    return logits


if __name__ == "__main__":
    rank.run_main(main, Config)
