"""labkit.theory: every formula against numbers worked out by hand, every refusal with its arithmetic."""

import subprocess
import sys

import pytest

from labkit.theory import collectives, sizes, spatial
from labkit.theory.spatial import ConvNeXtStage


@pytest.mark.parametrize(
    ("size", "ranks", "multiple", "expected"),
    [
        (16, 4, 1, [4, 4, 4, 4]),
        (17, 4, 1, [5, 5, 5, 2]),
        (7, 4, 1, [2, 2, 2, 1]),
        (512, 4, 32, [128] * 4),
        (36, 5, 4, [8, 8, 8, 8, 4]),
        (5, 1, 5, [5]),
    ],
)
def test_shard_sizes(size, ranks, multiple, expected):
    assert sizes.shard_sizes(size, ranks, multiple=multiple) == expected


@pytest.mark.parametrize(
    ("size", "ranks", "multiple", "message"),
    [
        (510, 4, 4, "4 ranks cannot share 510: a rank gets 126, 126 % 4 = 2; .* a multiple of 4 x 4 = 16"),
        (96, 4, 32, "a rank gets 24, 24 % 32 = 24; with a total stride of 32 take a multiple of 4 x 32 = 128"),
        (3, 4, 1, r"4 ranks cannot share 3: ceil\(3 / 4\) = 1 leaves the last ones nothing"),
        (9, 4, 1, r"ceil\(9 / 4\) = 3 leaves the last ones nothing"),
        (0, 4, 1, "cannot cut a size of 0 over 4 ranks"),
        (4, 0, 1, "cannot cut a size of 4 over 0 ranks"),
    ],
)
def test_shard_sizes_that_cannot_be(size, ranks, multiple, message):
    with pytest.raises(ValueError, match=message):
        sizes.shard_sizes(size, ranks, multiple=multiple)


@pytest.mark.parametrize("size", range(1, 30))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_shards_are_those_of_dtensor(size, ranks):
    import torch

    chunks = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    if len(chunks) == ranks:
        assert sizes.shard_sizes(size, ranks) == chunks
    else:
        with pytest.raises(ValueError, match="leaves the last ones nothing"):
            sizes.shard_sizes(size, ranks)


def test_even_share():
    assert sizes.even_share(12, 4) == 3
    with pytest.raises(ValueError, match="4 ranks cannot share a batch of 7: 7 % 4 = 3"):
        sizes.even_share(7, 4, what="a batch of")


@pytest.mark.parametrize(
    ("text", "ranks", "axes"),
    [
        ("", 3, {"space": 3}),
        ("4", 4, {"space": 4}),
        ("2x4", 8, {"data": 2, "space": 4}),
        ("1x1", 1, {"data": 1, "space": 1}),
    ],
)
def test_named_axes(text, ranks, axes):
    found = sizes.parse_mesh_axes(text, ranks)
    assert list(found.items()) == list(axes.items())


@pytest.mark.parametrize("text", ["x", "2x", "2x2x1", "0x4", "four", "2 x 2", "-4", "4.0"])
def test_a_mesh_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=f"mesh '{text}' is neither one number of ranks"):
        sizes.parse_mesh_axes(text, 4)


def test_a_mesh_for_other_ranks_is_refused():
    with pytest.raises(ValueError, match="mesh 2x3 is for 6 ranks, but 4 are launched"):
        sizes.parse_mesh_axes("2x3", 4)


def test_stages_of_a_network():
    assert spatial.convnext_stages(64, 128, (1, 2, 3), (8, 16, 32)) == [
        ConvNeXtStage(channels=8, height=16, width=32, depth=1),
        ConvNeXtStage(channels=16, height=8, width=16, depth=2),
        ConvNeXtStage(channels=32, height=4, width=8, depth=3),
    ]
    assert [spatial.total_stride((1,) * stages) for stages in (1, 2, 3, 4)] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 130, (1, 1), (8, 8)), "width 130 is not a multiple of the total stride 8: 130 % 8 = 2"),
        ((20, 64, (1, 1), (8, 8)), "height 20 is not a multiple of the total stride 8: 20 % 8 = 4"),
        ((0, 64, (1, 1), (8, 8)), "height 0"),
        ((64, 64, (1, 1), (8,)), r"depths \(1, 1\) and dims \(8,\) must have one entry a stage"),
        ((64, 64, (1, 0), (8, 8)), "each at least 1"),
        ((64, 64, (), ()), "must have one entry a stage"),
    ],
)
def test_a_network_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        spatial.check_convnext(*arguments)
    spatial.check_convnext(64, 128, (1, 1), (8, 8))


def test_strips_of_a_network():
    assert spatial.check_strips(96, 4, (1, 1)) == [24] * 4
    assert spatial.check_strips(8, 1, (1, 1)) == [8], "one rank needs no halo"
    assert spatial.check_strips(76, 5, (1,)) == [16, 16, 16, 16, 12]
    message = r"4 ranks cannot share 64: in the last stage a rank holds 16 / 8 = 2, less than the halo of 3; use fewer"
    with pytest.raises(ValueError, match=message):
        spatial.check_strips(64, 4, (1, 1))


def test_halo_bytes():
    # 32 rows x 3 columns x 8 channels x 2 samples x 4 bytes
    assert spatial.halo_bytes(rows=32, halo=3, channels=8, batch=2) == 6144
    assert spatial.halo_bytes(rows=32, halo=3, channels=8, batch=2, element_bytes=2) == 3072
    assert spatial.halo_bytes(rows=32, halo=0, channels=8, batch=2) == 0


@pytest.mark.parametrize(
    ("tensor_dim", "one_way"), [(3, 2 * 3 * (16 * 8 + 2 * 8 * 16)), (2, 2 * 3 * (32 * 8 + 2 * 16 * 16))]
)
@pytest.mark.parametrize("neighbours", [0, 1, 2])
def test_bytes_that_a_rank_sends_in_a_step(tensor_dim, one_way, neighbours):
    stages = spatial.convnext_stages(64, 128, (1, 2), (8, 16))  # 16 x 32 in one block, then 8 x 16 in two
    sent = spatial.spatial_send_bytes(stages=stages, batch=2, neighbours=neighbours, tensor_dim=tensor_dim)
    assert sent == 4 * 2 * neighbours * one_way  # 4 bytes; forward and backward


def test_number_of_parameters():
    # stem 3 x 2 x 16 + 2 and norm 4; block 49 x 2 + 2, norm 4, 2 x 8 + 8, 8 x 2 + 2, gamma 2; head 2 x 10 + 10
    assert spatial.convnext_parameters((1,), (2,), num_classes=10) == (98 + 4) + (100 + 4 + 24 + 18 + 2) + 30
    # a second stage: norm of 2, 2 x 4 x 4 + 4, block of 4: 49 x 4 + 4, 8, 4 x 16 + 16, 16 x 4 + 4, 4; head 4 x 10 + 10
    second = (4 + 36) + (200 + 8 + 80 + 68 + 4)
    assert spatial.convnext_parameters((1, 1), (2, 4), num_classes=10) == 102 + 148 + second + 50
    assert spatial.convnext_parameter_tensors((1, 1)) == 4 + 9 + 4 + 9 + 2


def test_all_reduces_of_a_step():
    network = {
        "depths": (1,),
        "dims": (2,),
        "num_classes": 10,
        "batch": 3,
    }  # 280 parameters in 15 tensors, 30 in the head
    count = spatial.spatial_all_reduces
    assert count(strategy="local", space_ranks=1, **network) == (0, 0)
    assert count(strategy="local", space_ranks=4, **network) == (2, 4 * (280 + 3 * 2))
    assert count(strategy="local", space_ranks=2, data_ranks=2, **network) == (3, 4 * (2 * 280 + 3 * 2))
    assert count(strategy="dtensor", space_ranks=4, **network) == (14, 4 * (250 + 3 * 2))
    assert count(strategy="dtensor", space_ranks=2, data_ranks=2, **network) == (29, 4 * (2 * 250 + 30 + 3 * 2))
    with pytest.raises(ValueError, match="strategy 'native' is neither 'local' nor 'dtensor'"):
        count(strategy="native", space_ranks=2, **network)


def test_bytes_of_an_all_reduce():
    assert collectives.all_reduce_bytes(10) == 40
    assert collectives.all_reduce_bytes(10, element_bytes=2) == 20
    assert [collectives.collective_wire_bytes("all_reduce", 1000, ranks) for ranks in (1, 2, 4)] == [0, 1000, 1500]


def test_time_of_a_message():
    assert collectives.AlphaBeta(1e-5, 1e-9).seconds(1e6) == pytest.approx(1.01e-3)


def test_activations_of_one_block():
    stage = [ConvNeXtStage(channels=8, height=4, width=6, depth=1)]
    pixels = 2 * 4 * 6
    # eleven maps and the norm's mean and deviation a pixel, then the stem's norm: its input, mean and deviation
    alone = 11 * 8 * pixels + 2 * pixels + 8 * pixels + 2 * pixels
    assert spatial.convnext_activation_bytes(stages=stage, batch=2) == 4 * alone
    by_width = alone + 2 * 4 * 2 * 3 * 8  # samples x rows x both halos x 3 columns x channels
    by_height = alone + 2 * 6 * 2 * 3 * 8
    assert spatial.convnext_activation_bytes(stages=stage, batch=2, ranks=2) == 4 * by_width
    assert spatial.convnext_activation_bytes(stages=stage, batch=2, ranks=4, tensor_dim=2) == 4 * by_height
    assert spatial.convnext_activation_bytes(stages=stage, batch=2, element_bytes=2) == 2 * alone


def test_activations_between_stages_include_the_downsampling():
    stages = [ConvNeXtStage(8, 4, 4, depth=1), ConvNeXtStage(16, 2, 2, depth=2)]
    first = (12 * 8 * 16 + 2 * 16) + (8 * 16 + 2 * 16)  # its block and the stem's norm
    norm = 2 * 8 * 16 + 2 * 16  # its input and output, its mean and deviation a pixel
    second = (12 * 16 * 4 + 2 * 4) + (11 * 16 * 4 + 2 * 4)  # the last block lacks one map when memory peaks
    assert spatial.convnext_activation_bytes(stages=stages, batch=1) == 4 * (first + norm + second)


def test_formulas_need_no_torch():
    code = "import sys; import labkit.theory; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("depths", "dims", "largest"), [((2, 3), (8, 64), 1), ((2, 3), (32, 16), 0)])
def test_a_checkpointed_block_that_is_computed_again_stands_beside_the_inputs_before_it(depths, dims, largest):
    stages = spatial.convnext_stages(16, 32, depths=depths, dims=dims)
    inputs = [4 * 5 * each.channels * each.height * each.width for each in stages]
    before = [inputs[0], 2 * inputs[0] + 2 * inputs[1]][largest]
    assert spatial.checkpointed_bytes(stages, batch=5) == before + 12 * inputs[largest]
