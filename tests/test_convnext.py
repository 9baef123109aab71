"""labkit.models.convnext: shapes, values by hand, stochastic depth, starting weights. One process, no ranks."""

import math
import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import build_config
from labkit.models.convnext import ChannelLayerNorm, ConvNeXt, ConvNeXtBlock, Downsample, GlobalMean, StochasticDepth
from labkit.theory import spatial
from launch import convnext_spatial


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_shapes_through_the_network():
    images = torch.randn(2, 3, 32, 64)
    assert Downsample(3, 8, scale=4, norm_first=False)(images).shape == (2, 8, 8, 16)
    assert Downsample(3, 8, scale=2, norm_first=True)(images).shape == (2, 8, 16, 32)
    assert ConvNeXtBlock(3)(images).shape == images.shape
    assert GlobalMean()(images).shape == (2, 3)
    assert ConvNeXt(num_classes=7, depths=(1, 2, 1), dims=(4, 6, 8))(images).shape == (2, 7)


def test_the_default_network_is_that_of_the_specification():
    model = ConvNeXt()
    assert [type(module).__name__ for module in model.stages] == ["Downsample", "ConvNeXtBlock"] * 2
    assert model.stages[0].conv.weight.shape == (2, 3, 4, 4)
    assert model.stages[2].conv.weight.shape == (4, 2, 2, 2)
    assert model.head.weight.shape == (10, 4)
    assert [len(model.stages[stage].norm.weight) for stage in (0, 2)] == [2, 2], "after the stem, before the others"
    for block in (ConvNeXtBlock(2), model.stages[1], model.stages[3]):
        assert (block.gamma == 1e-6).all()
        assert (block.norm.eps, block.drop_path.drop_rate) == (1e-6, 0.0)


def backward_flops(model, images):
    with FlopCounterMode(display=False) as counter:
        loss = model(images).square().sum()
        before = counter.get_total_flops()
        loss.backward()
    return counter.get_total_flops() - before


def test_the_gradient_of_the_images_is_work_of_the_stem():
    model, images = ConvNeXt(dims=(4, 8)), torch.randn(2, 3, 16, 32)
    without = backward_flops(model, images)
    of_stem = 2 * (2 * 4 * 8) * 4 * (3 * 4 * 4)  # samples and places x channels out x channels in and kernel
    assert backward_flops(model, images.requires_grad_()) - without == of_stem
    assert images.grad.abs().amax(dim=(1, 2, 3)).min() > 0


def test_the_papers_run_computes_the_gradient_of_its_images(monkeypatch):
    seen, train = [], convnext_spatial.train

    def watch(config, measure, model, images, labels, **more):
        seen.append(images)
        return train(config, lambda steps, **how: measure(1, **how), model, images, labels, **more)

    monkeypatch.setattr(convnext_spatial, "train", watch)
    small = {"batch": 2, "height": 16, "width": 16, "depths": (1, 1), "dims": (4, 8), "strategy": "plain"}
    with mock.patch.dict(os.environ, LABKIT_DEVICE="cpu"):  # a session sets variables
        for preset in ("paper", "small"):
            convnext_spatial.main(build_config(convnext_spatial.Config, {"preset": preset, **small}, 1))
    assert [images.grad is not None for images in seen] == [True, False]
    assert seen[0].grad.any()


def test_mean_over_the_image():
    x = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4)
    assert GlobalMean()(x).tolist() == [[5.5, 17.5]]


def test_layers_of_a_block():
    block = ConvNeXtBlock(4, layer_scale_init_value=0.5)
    depthwise = block.depthwise
    assert (depthwise.kernel_size, depthwise.padding, depthwise.groups) == ((7, 7), (3, 3), 4)
    assert (block.expand.weight.shape, block.project.weight.shape) == ((16, 4, 1, 1), (4, 16, 1, 1))
    x = torch.randn(2, 4, 8, 8)
    hidden = nn.functional.gelu(block.expand(block.norm(depthwise(x))))
    torch.testing.assert_close(block(x), x + 0.5 * block.project(hidden))


@pytest.mark.parametrize(("norm_first", "norm_channels"), [(True, 3), (False, 5)])
def test_downsample_norms_before_or_after(norm_first, norm_channels):
    layer = Downsample(3, 5, scale=2, norm_first=norm_first)
    assert layer.norm.weight.shape == (norm_channels,)
    x = torch.randn(1, 3, 4, 4)
    expected = layer.conv(layer.norm(x)) if norm_first else layer.norm(layer.conv(x))
    torch.testing.assert_close(layer(x), expected)


def test_channel_norm_equals_a_hand_computation():
    norm = ChannelLayerNorm(3, eps=1e-2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.5, -0.5, 0.0]))
    x = torch.randn(2, 3, 4, 5)
    deviation = (x.var(dim=1, unbiased=False, keepdim=True) + 1e-2).sqrt()
    normed = (x - x.mean(dim=1, keepdim=True)) / deviation
    expected = normed * norm.weight.view(1, 3, 1, 1) + norm.bias.view(1, 3, 1, 1)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize(("init", "shape"), [(1e-6, (4, 1, 1)), (0.0, None), (-1.0, None)])
def test_gamma_is_absent_when_its_start_is_zero_or_less(init, shape):
    block = ConvNeXtBlock(4, layer_scale_init_value=init)
    if shape is None:
        assert block.gamma is None
        assert "gamma" not in dict(block.named_parameters())
    else:
        assert block.gamma.shape == shape
        assert block.gamma.unique().tolist() == pytest.approx([init])
    assert block(torch.randn(1, 4, 8, 8)).shape == (1, 4, 8, 8)


def drop_rates(model):
    return [module.drop_path.drop_rate for module in model.modules() if isinstance(module, ConvNeXtBlock)]


def test_drop_path_grows_linearly_over_all_blocks_of_all_stages():
    model = ConvNeXt(depths=(2, 3, 1), dims=(2, 2, 2), drop_path_rate=0.5)
    assert drop_rates(model) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert drop_rates(ConvNeXt(depths=(1,), dims=(2,), drop_path_rate=0.5)) == [0.0]


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    samples = 4000
    layer = StochasticDepth(0.25)
    out = layer(torch.ones(samples, 2, 3, 1))
    per_sample = out.reshape(samples, -1)
    assert (per_sample == per_sample[:, :1]).all()
    assert sorted(per_sample[:, 0].unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    deviation = math.sqrt(0.25 / 0.75 / samples)  # of the mean of so many independent samples
    assert abs(out.mean().item() - 1) < 5 * deviation


def test_stochastic_depth_drops_gradients_with_the_samples():
    branch = torch.ones(64, 2, 3, 3, requires_grad=True)
    out = StochasticDepth(0.5)(branch)
    out.sum().backward()
    assert torch.equal(branch.grad, out.detach())


def test_stochastic_depth_is_the_identity_in_eval_mode_and_at_rate_zero():
    branch = torch.randn(8, 2, 3, 3)
    assert StochasticDepth(0.9).eval()(branch) is branch
    assert StochasticDepth(0.0)(branch) is branch


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_a_drop_rate_outside_its_range_is_refused(rate):
    with pytest.raises(ValueError, match=rf"drop rate {rate} is not in \[0, 1\)"):
        StochasticDepth(rate)


def test_ranks_with_other_samples_go_on_in_the_same_stream():
    whole, halves = StochasticDepth(0.5), [StochasticDepth(0.5), StochasticDepth(0.5)]
    for shard, layer in enumerate([whole, *halves]):
        layer.generator = torch.Generator().manual_seed(3)
        if shard:
            layer.shard, layer.shards = shard - 1, 2
    for _ in range(3):  # the streams must stay together over steps
        assert torch.equal(whole.keep_factors(64), torch.cat([half.keep_factors(32) for half in halves]))


def test_two_runs_with_dropped_samples_are_alike_only_in_eval_mode():
    model = ConvNeXt(depths=(1, 2), dims=(4, 4), drop_path_rate=0.9, layer_scale_init_value=1.0)
    images = torch.randn(16, 3, 16, 16)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_head_init_scale_scales_the_head_alone():
    def made(scale):
        torch.manual_seed(1)
        return ConvNeXt(head_init_scale=scale).state_dict()

    plain, scaled = made(1.0), made(0.25)
    assert plain["head.weight"].abs().max() > 0
    for name in plain:
        factor = 0.25 if name.startswith("head.") else 1.0
        torch.testing.assert_close(scaled[name], factor * plain[name])


def test_default_weights_are_a_truncated_normal_of_deviation_one_fifth_and_biases_zero():
    model = ConvNeXt(depths=(1,), dims=(64,))
    weight = model.stages[1].expand.weight
    assert weight.std().item() == pytest.approx(0.2, rel=0.05)
    assert abs(weight.mean().item()) < 0.01
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | ChannelLayerNorm):
            assert not module.bias.any()
        if isinstance(module, ChannelLayerNorm):
            assert (module.weight == 1).all()


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_ones_give_the_loss_of_guessing_whatever_the_image(num_classes):
    model = ConvNeXt(num_classes=num_classes, dims=(8, 16), init="ones", layer_scale_init_value=1.0)
    labels = torch.arange(2)
    for images in (
        torch.randn(2, 3, 16, 32),
        torch.zeros(2, 3, 16, 32),
        torch.linspace(-9, 9, 3072).view(2, 3, 16, 32),
    ):
        assert cross_entropy(model(images), labels).item() == pytest.approx(math.log(num_classes), rel=1e-6)


def test_default_weights_do_not():
    model = ConvNeXt(dims=(8, 16), layer_scale_init_value=1.0)
    losses = [cross_entropy(model(torch.randn(2, 3, 16, 32)), torch.arange(2)).item() for _ in range(2)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_builds_on_the_meta_device():
    options = {"depths": (1, 2), "dims": (8, 16), "drop_path_rate": 0.5, "head_init_scale": 0.5}
    with torch.device("meta"):
        model = ConvNeXt(**options)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert drop_rates(model) == pytest.approx([0.0, 0.25, 0.5])
    model.to_empty(device="cpu")
    expected = ConvNeXt(**options)
    for one in (model, expected):
        torch.manual_seed(2)
        one.init_weights("trunc_normal")
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, wanted), name
    assert model(torch.randn(2, 3, 16, 16)).isfinite().all()


@pytest.mark.parametrize(
    ("depths", "dims", "num_classes", "in_chans"),
    [((1,), (2,), 10, 3), ((1, 1), (2, 4), 10, 3), ((3, 1, 2), (8, 6, 5), 7, 1), ((2, 2, 2), (32, 64, 128), 10, 3)],
)
def test_number_of_parameters_is_what_theory_says(depths, dims, num_classes, in_chans):
    model = ConvNeXt(in_chans=in_chans, num_classes=num_classes, depths=depths, dims=dims)
    predicted = spatial.convnext_parameters(depths, dims, num_classes, in_chans)
    assert sum(p.numel() for p in model.parameters()) == predicted
    assert len(list(model.parameters())) == spatial.convnext_parameter_tensors(depths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1,), "dims": (2, 4)}, r"depths \(1,\) and dims \(2, 4\) must have one entry a stage"),
        ({"depths": (), "dims": ()}, "at least one"),
        ({"init": "zeros"}, "init 'zeros' is neither 'trunc_normal' nor 'ones'"),
    ],
)
def test_a_network_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ConvNeXt(**options)
