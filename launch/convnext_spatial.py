"""Train ConvNeXt with its activations sharded along the width (or the height) of the images.

    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial                   # small, any machine
    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial --check parity    # equal to one device?
    torchrun --standalone --nproc-per-node 4 -m launch.convnext_spatial --preset paper    # four GPUs

Each rank holds one strip of every image and of every feature map; a convolution asks its neighbours for a few columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from labkit import parity, photo, rank, theory, upstream
from labkit.models.convnext import ConvNeXt
from labkit.parallel.spatial import apply_spatial, own_samples, shard_batch


@dataclass
class Config:
    """What to train, on what, and how it is sharded."""

    preset: Literal["small", "bench", "paper"] = "small"
    """Defaults for everything below: small runs on any machine, bench is the benchmark's, paper needs four GPUs."""
    strategy: Literal["plain", "native", "native_unguarded", "dtensor", "local"] = "local"
    """Who exchanges the halo: nobody (one rank), PyTorch (unguarded: even where it is wrong), labkit in two ways."""
    tensor_dim: Literal[2, 3] = 3
    """The dimension of [N, C, H, W] that is cut: 2 is the height, 3 the width."""
    mesh: str = ""
    """Ranks as 4 (all along the image) or 2x2 (data x space: samples are shared out as well); empty: all along it."""
    data: Literal["random", "photo"] = "random"
    """Random images and labels, or tiles of a photo: which of ten regions does each show?"""
    batch: int = 2
    """Images in a step, over all ranks."""
    height: int = 128
    """Image height in pixels."""
    width: int = 256
    """Image width in pixels."""
    num_classes: int = 10
    """Outputs of the classifier."""
    depths: tuple[int, ...] = (1, 1)
    """Blocks in each stage."""
    dims: tuple[int, ...] = (32, 64)
    """Channels in each stage."""
    drop_path_rate: float = 0.0
    """Stochastic depth of the last block."""
    layer_scale_init_value: float = 1e-6
    """Start of each block's layer scale; 0 for none."""
    init: Literal["trunc_normal", "ones"] = "trunc_normal"
    """How weights start. With ones every channel is equal, and the loss says nothing."""
    learning_rate: float = 1e-4
    """Of Adam."""
    steps: int = 5
    """Timed steps, after one to warm up."""
    seed: int = 0
    """Of weights and images."""
    check: Literal["none", "parity"] = "none"
    """parity: compare one step with one device instead of training."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "bench": {"height": 256, "width": 512, "depths": (2, 2, 2), "dims": (64, 128, 256), "steps": 10},
        "paper": {"batch": 7, "height": 512, "width": 1024, "num_classes": 1000, "steps": 20,
                  "depths": (3, 3, 27, 3), "dims": (256, 512, 1024, 2048)},
    }  # fmt: skip

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work, before anything is launched."""
        upstream.refuse_if_broken(self.strategy)
        ranks = theory.named_axes(self.mesh, world_size)
        if self.strategy == "plain" and world_size > 1:
            raise ValueError(f"strategy plain is one device's training: it takes 1 rank, not {world_size}")
        theory.check_convnext(self.height, self.width, self.depths, self.dims)
        theory.even_share(self.batch, ranks.get("data", 1), what="a batch of")
        theory.check_strips((self.height, self.width)[self.tensor_dim - 2], ranks["space"], self.depths)


def main(config: Config) -> None:
    """Train and measure, or compare one step with one device's."""
    with rank.session() as here:
        mesh = here.mesh(**theory.named_axes(config.mesh, here.world_size))
        torch.manual_seed(config.seed)
        model = ConvNeXt(3, config.num_classes, config.depths, config.dims, config.drop_path_rate,
                         config.layer_scale_init_value, init=config.init)  # fmt: skip
        model = model.to(here.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = photo.batch(config.data, config.batch, config.height, config.width, config.num_classes, config.seed)
        batch = whole = batch[0].to(here.device), batch[1].to(here.device)  # [N, 3, H, W], [N], equal on all ranks
        reference = parity.seeded_copy(model, config.seed) if config.check == "parity" else model
        if config.strategy != "plain":
            apply_spatial(model, mesh, strategy=config.strategy, tensor_dim=config.tensor_dim)
            batch = shard_batch(*whole, mesh, tensor_dim=config.tensor_dim, stride=theory.total_stride(config.depths))
        logits = train(config, here.steps if config.check == "none" else here.one_step, model, *batch)
        if config.check == "parity":
            expected = train(config, here.one_step, reference, *whole)[own_samples(mesh, config.batch)]
            here.verdict(**parity.of_training_step(model, logits, reference, expected, limit=1e-5))


def train(config: Config, measure: rank.Measure, model: ConvNeXt, images: Tensor, labels: Tensor) -> Tensor:
    """Forward, backward and update in every measured step; the last logits [N, num_classes] of this rank's samples."""
    torch.manual_seed(config.seed)  # whoever trains drops the same samples
    epsilon = 1e-8 if config.check == "none" else 1e-3  # Adam's first step is a sign: rounding decides that of 0
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, eps=epsilon, fused=True)
    for step in measure(config.steps, track=[model, optimizer, images, labels]):
        optimizer.zero_grad()
        with step.span("forward"):
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        with step.span("backward"):
            loss.backward()
        with step.span("optimizer"):
            optimizer.step()
        step.scalar("loss", loss)
    return logits


if __name__ == "__main__":
    rank.start(main, Config)
