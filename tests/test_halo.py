"""labkit.parallel.halo and buckets on four real ranks, held against one device's convolution of the whole image."""

from pathlib import Path

import pytest
import torch
from programs.halo_cases import CASES
from torch import nn

import labkit
from labkit.parallel.buckets import assign_buckets, bucket_parameters
from labkit.parallel.halo import HaloConv2d, Strip, halo_size, pad_with_halo

ROUNDING = 1e-12  # float64


@pytest.fixture(scope="module")
def four_ranks():
    return labkit.run(Path(__file__).parent / "programs" / "halo_cases.py", nproc=4, device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_convolution_of_strips_equals_that_of_the_image(four_ranks, case):
    assert four_ranks.value(f"{case} compared") == CASES[case].compared
    assert four_ranks.value(f"{case} error") < ROUNDING


@pytest.mark.parametrize("uneven", [False, True])
def test_mean_over_strips_is_that_of_the_image(four_ranks, uneven):
    assert four_ranks.value(f"mean_{uneven=} compared") == 2
    assert four_ranks.value(f"mean_{uneven=} error") < ROUNDING


@pytest.mark.parametrize("axes", [1, 2])
def test_buckets_leave_the_mean_gradient_on_every_rank(four_ranks, axes):
    assert four_ranks.value(f"buckets_{axes} compared") == 6
    assert four_ranks.value(f"buckets_{axes} error") < ROUNDING


def test_one_rank_alone_needs_no_process_group():
    strip = Strip(dim=3, group=None, rank=0, ranks=1)
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(pad_with_halo(x, 2, strip), nn.functional.pad(x, (2, 2)))


@pytest.mark.parametrize(("dim", "shape"), [(3, (1, 2, 9, 2)), (2, (1, 2, 2, 9))])
def test_a_strip_narrower_than_its_halo_is_refused_before_any_communication(dim, shape):
    strip = Strip(dim=dim, group=None, rank=1, ranks=4)  # there is no process group to talk to
    message = f"rank 1 of 4 holds 2 along dim {dim}, less than the halo of 3: use fewer ranks or a larger image"
    conv = nn.Conv2d(2, 2, 7, padding=3)
    with pytest.raises(ValueError, match=message):
        HaloConv2d(conv, 3, strip)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("settings", "halo"),
    [
        ({"kernel_size": 7, "padding": 3}, 3),
        ({"kernel_size": 3, "padding": 1}, 1),
        ({"kernel_size": 5, "padding": 6, "dilation": 3}, 6),
        ({"kernel_size": 1}, 0),
        ({"kernel_size": 4, "stride": 4}, 0),
        ({"kernel_size": 2, "stride": 2}, 0),
    ],
)
@pytest.mark.parametrize("dim", [2, 3])
def test_halo_of_a_convolution(settings, halo, dim):
    assert halo_size(nn.Conv2d(1, 1, **settings), dim) == halo


def test_halo_of_height_and_width_differ_where_the_kernel_does():
    conv = nn.Conv2d(1, 1, kernel_size=(3, 7), padding=(1, 3))
    assert (halo_size(conv, 2), halo_size(conv, 3)) == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel_size": 4, "padding": 2}, "kernel 4, stride 1, padding 2, dilation 1 .* = 3, or stride = kernel"),
        ({"kernel_size": 2}, "kernel 2, stride 1, padding 0"),
        ({"kernel_size": 7, "padding": 2}, r"2 x padding = dilation x \(kernel - 1\) = 6"),
        ({"kernel_size": 3, "padding": 1, "dilation": 2}, r"dilation x \(kernel - 1\) = 4"),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, "kernel 3, stride 2"),
        ({"kernel_size": 2, "padding": 1, "stride": 2}, "kernel 2, stride 2, padding 1"),
        ({"kernel_size": 2, "stride": 2, "dilation": 2}, "kernel 2, stride 2, padding 0, dilation 2"),
        ({"kernel_size": 2, "stride": 3}, "kernel 2, stride 3"),
        ({"kernel_size": 3, "padding": "same"}, "padding 'same' with mode 'zeros' cannot be sharded"),
        ({"kernel_size": 3, "padding": "valid"}, "padding 'valid'"),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, "with mode 'reflect' cannot be sharded"),
    ],
)
@pytest.mark.parametrize("dim", [2, 3])
def test_a_convolution_that_cannot_be_cut_is_refused(settings, message, dim):
    with pytest.raises(ValueError, match=message):
        halo_size(nn.Conv2d(1, 1, **settings), dim)


def test_buckets_close_once_they_are_full():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (10, 20, 30, 40)]
    sizes = [[p.numel() for p in bucket] for bucket in bucket_parameters(parameters, 4 * 45, assign_buckets)]
    assert sizes == [[40, 30], [20, 10]]  # the backward pass's order; the second one stays below the limit
    assert bucket_parameters(parameters, 4 * 1000, assign_buckets) == [parameters[::-1]]
    assert bucket_parameters([], 100, assign_buckets) == []
