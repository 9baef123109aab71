"""ConvNeXt, an image classifier made of convolutions, as plain single-device code.

Feature maps are [N, C, H, W]; the stem divides H and W by 4, every later downsampling by 2. Source:
Liu et al., "A ConvNet for the 2020s", 2022 (arXiv:2201.03545).
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

Init = Literal["trunc_normal", "ones"]


class ChannelLayerNorm(nn.Module):
    """Layer normalisation over the channels of a feature map [N, C, H, W], each pixel by itself."""

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        # layer_norm works on the last dimensions.
        x = x.permute(0, 2, 3, 1)
        normed = functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    """Drop a residual branch of random samples, in training; scale others (arXiv:1603.09382)."""

    def __init__(self, drop_rate: float):
        super().__init__()
        if not 0 <= drop_rate < 1:
            raise ValueError(f"drop rate {drop_rate} is not in [0, 1)")
        self.drop_rate = drop_rate
        self.generator: torch.Generator | None = None
        self.shard, self.shards = 0, 1

    def keep_factors(self, samples: int) -> Tensor:
        """Draw 0 or 1 / (1 - drop_rate) for each of this rank's samples: [N], on the CPU."""
        # A rank that holds only some samples, or a part of each image, must decide like all others.
        # So it draws for all shards from a generator that every rank seeds alike, on the CPU.
        drawn = torch.rand(samples * self.shards, generator=self.generator, device="cpu")
        mine = drawn[self.shard * samples : (self.shard + 1) * samples]
        return (mine >= self.drop_rate).float() / (1 - self.drop_rate)

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.drop_rate == 0:
            return branch
        return branch * self.keep_factors(branch.shape[0]).to(branch).view(-1, 1, 1, 1)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, norm, pointwise, GELU, pointwise, scale ``gamma`` [C, 1, 1], residual."""

    def __init__(self, dim: int, drop_path: float = 0.0, layer_scale_init_value: float = 1e-6):
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = ChannelLayerNorm(dim)
        self.expand = nn.Conv2d(dim, 4 * dim, kernel_size=1)
        self.activation = nn.GELU()
        self.project = nn.Conv2d(4 * dim, dim, kernel_size=1)
        self.layer_scale_init_value = layer_scale_init_value
        self.gamma: nn.Parameter | None = None
        if layer_scale_init_value > 0:
            self.gamma = nn.Parameter(torch.full((dim, 1, 1), layer_scale_init_value))
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm(self.depthwise(x))
        branch = self.project(self.activation(self.expand(branch)))
        if self.gamma is not None:
            branch = self.gamma * branch
        return x + self.drop_path(branch)


class Downsample(nn.Module):
    """Divide H and W by ``scale`` with a convolution, after a norm; in the stem, before one."""

    def __init__(self, dim_in: int, dim_out: int, scale: int, norm_first: bool):
        super().__init__()
        self.norm_first = norm_first
        self.norm = ChannelLayerNorm(dim_in if norm_first else dim_out)
        self.conv = nn.Conv2d(dim_in, dim_out, kernel_size=scale, stride=scale)

    def forward(self, x: Tensor) -> Tensor:
        """[N, dim_in, H, W] to [N, dim_out, H / scale, W / scale]."""
        return self.conv(self.norm(x)) if self.norm_first else self.norm(self.conv(x))


class GlobalMean(nn.Module):
    """The mean of every channel over the whole image: [N, C, H, W] to [N, C]."""

    # A module of its own, because a rank with a strip replaces it: its mean is over all strips.

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class ConvNeXt(nn.Module):
    """Per stage a Downsample and ``depths[i]`` blocks of ``dims[i]`` channels; mean and head."""

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 10,
        depths: Sequence[int] = (1, 1),
        dims: Sequence[int] = (2, 4),
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        head_init_scale: float = 1.0,
        init: Init = "trunc_normal",
    ):
        super().__init__()
        if len(depths) != len(dims) or not depths:
            given = f"depths {tuple(depths)} and dims {tuple(dims)}"
            raise ValueError(f"{given} must have one entry a stage, at least one")
        # Stochastic depth grows linearly, from 0 at the first block.
        rates = numpy.linspace(0, drop_path_rate, sum(depths)).tolist()
        stages: list[nn.Module] = []
        for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
            dim_in = dims[stage - 1] if stage else in_chans
            stages.append(Downsample(dim_in, dim, scale=2 if stage else 4, norm_first=stage > 0))
            for _ in range(depth):
                stages.append(ConvNeXtBlock(dim, rates.pop(0), layer_scale_init_value))
        self.stages = nn.Sequential(*stages)
        self.mean = GlobalMean()
        self.head = nn.Linear(dims[-1], num_classes)
        self.head_init_scale = head_init_scale
        self.init_weights(init)

    def init_weights(self, init: Init) -> None:
        """Fill weights and biases again, as after ``to_empty`` on a model from the meta device."""
        if init not in ("trunc_normal", "ones"):
            raise ValueError(f"init {init!r} is neither 'trunc_normal' nor 'ones'")
        # With ones all channels are equal: the norm returns 0, and the loss is ln(num_classes),
        # whatever else is wrong. So it is not the default.
        fill = nn.init.ones_ if init == "ones" else partial(nn.init.trunc_normal_, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                fill(module.weight)
            elif isinstance(module, ChannelLayerNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, ConvNeXtBlock) and module.gamma is not None:
                nn.init.constant_(module.gamma, module.layer_scale_init_value)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
        with torch.no_grad():
            self.head.weight.mul_(self.head_init_scale)
            self.head.bias.mul_(self.head_init_scale)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, in_chans, H, W] to logits [N, num_classes]."""
        return self.head(self.mean(self.stages(images)))
