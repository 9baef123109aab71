"""labkit.theory.ddp: by hand, and against the code of PyTorch that it describes."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._inductor.fx_passes import ddp_fusion

from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta
from labkit.theory.ddp import MIB, bucket_plan, chain_buckets, chain_gradients

KIB = 1024


@pytest.mark.parametrize(
    ("sizes_kib", "bucket_mb", "plan"),
    [
        ([1024, 1, 1], 25, [[0], [1, 2]]),  # exactly full is full
        ([1023, 1, 1], 25, [[0, 1], [2]]),
        ([4096], 1, [[0]]),  # one gradient is never cut
        ([10, 10, 10], 25, [[0, 1, 2]]),  # the first bucket takes all that does not fill it
        ([2048, 1024, 1024, 1024], 2, [[0], [1, 2], [3]]),
        ([2048, 512, 100, 3000, 1], 0.5, [[0], [1], [2, 3], [4]]),
        ([], 25, []),
    ],
)
def test_plans_by_hand(sizes_kib, bucket_mb, plan):
    assert bucket_plan([size * KIB for size in sizes_kib], bucket_mb) == plan


def random_sizes(seed):
    """Bytes of gradients, multiples of a float32, from below 1 KiB to 4 MiB."""
    draw = random.Random(seed)
    return [4 * int(2 ** draw.uniform(4, 20)) for _ in range(draw.randint(1, 40))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("bucket_mb", "first_mb"), [(25.0, 1.0), (1.5, 1.5), (0.25, 1.0)])
def test_plans_are_those_of_ddps_reducer(seed, bucket_mb, first_mb):
    sizes = random_sizes(seed)
    tensors = [torch.empty(size // 4) for size in sizes]
    limits = [int(first_mb * MIB), int(bucket_mb * MIB)]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert bucket_plan(sizes, bucket_mb, first_mb) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bucket_mb", [25, 2, 0.5])
def test_plans_are_those_of_inductors_pass(seed, bucket_mb, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    sizes, float32 = random_sizes(seed), SimpleNamespace(meta={"tensor_meta": SimpleNamespace(dtype=torch.float32)})
    blocks = [SimpleNamespace(place=i, comm_node=float32, shape=torch.Size([n // 4])) for i, n in enumerate(sizes)]
    buckets = ddp_fusion._bucket_size_fusion(None, blocks, bucket_mb)
    assert bucket_plan(sizes, bucket_mb) == [[block.place for block in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("bucket_mb", "way", "sizes"),
    [
        (25, "compiled", [16_000_000, 32_016_000, 16_016_000]),
        (25, "eager", [16_008_000, 32_016_000, 16_008_000]),
        (25, "backward_only", [16_008_000, 32_016_000, 16_008_000]),
        (1, "compiled", [16_000_000, 16_008_000, 16_008_000, 16_008_000, 8_000]),
        (100, "compiled", [16_000_000, 48_032_000]),
        (100, "eager", [64_032_000]),  # DDP gives up its small first bucket with any size but 25
        (100, "backward_only", [16_008_000, 48_024_000]),
    ],
)
def test_the_chain_of_width_2000(bucket_mb, way, sizes):
    assert [sum(bucket.values()) for bucket in chain_buckets(2000, bucket_mb, way=way)] == sizes


def test_sixteen_bits_halve_the_bytes_and_forbid_the_compiler_to_fuse():
    whole = {name: size for bucket in chain_buckets(100) for name, size in bucket.items()}
    for way in ("eager", "compiled"):
        buckets = chain_buckets(100, way=way, compressed=True)
        assert {name: 2 * size for bucket in buckets for name, size in bucket.items()} == whole
        assert len(buckets) == (1 if way == "eager" else 8)
    assert len(chain_buckets(100, way="compiled", fuse=False)) == 8


def test_gradients_come_last_layer_first():
    assert [name for name, _ in chain_gradients(8)][:3] == ["fc4.bias", "fc4.weight", "fc3.bias"]
    assert chain_gradients(8, "compiled")[:2] == [("fc4.weight", 256), ("fc4.bias", 32)]


def test_a_deeper_chain_has_more_of_the_same():
    assert chain_gradients(8, layers=100)[:2] == [("fc100.bias", 32), ("fc100.weight", 256)]
    assert sum(size for _, size in chain_gradients(64, layers=100)) == 1_664_000
    assert len(chain_buckets(64, 0.0001, layers=100)) == 200
    assert [sum(bucket.values()) for bucket in chain_buckets(64, layers=100)] == [1_048_576, 615_424]


def test_buckets_arrive_in_their_order_one_at_a_time():
    assert theory.arrivals([], []) == []
    assert theory.arrivals([4, 8, 12], [3, 3, 3]) == [7, 11, 15], "the link is idle between"
    assert theory.arrivals([1, 2, 3], [5, 5, 5]) == [6, 11, 16], "the link is the limit"
    assert theory.arrivals([12, 4, 8], [3, 3, 3]) == [15, 18, 21], "the late one holds up the others"


def test_the_smallest_bucket_just_fills_the_backward_pass():
    size = theory.smallest_bucket_bytes(1e6, 2.0, 0.01, 1e-6)
    assert 1e6 / size * 0.01 + 1e6 * 1e-6 == pytest.approx(2.0)
    assert theory.smallest_bucket_bytes(1e6, 1.0, 0.01, 1e-6) == float("inf"), "no room for any message"


def test_a_bucket_travels_for_its_latency_and_its_bytes():
    full, takes = theory.bucket_times([[0, 1], [2]], [100, 200, 300], [2, 4, 8], 3, 0.25)
    assert (full, takes) == ([4, 8], [3 + 75, 3 + 75])


def test_a_bucket_is_full_with_its_last_gradient_and_every_layer_takes_its_part():
    buckets = chain_buckets(64, 0.0001, layers=4)  # a bucket for each gradient, bias before weight
    assert theory.bucket_ready_times(buckets, 4, 8.0) == [2, 2, 4, 4, 6, 6, 8, 8]
    assert theory.bucket_ready_times(chain_buckets(64, 100, layers=4), 4, 8.0) == [8]


def test_a_message_leaves_when_its_bucket_is_full_and_the_one_before_it_has_arrived():
    assert theory.bucket_transfer_times([1, 2, 8], [3, 3, 1]) == [(1, 4), (4, 7), (8, 9)]


def test_a_backward_pass_ends_between_its_last_message_and_all_of_them_after_it():
    network = AlphaBeta(1e-4, 1e-9)
    for bucket_mb in (0.0001, 0.1, 100):
        *_, (_, end) = theory.backward_transfer_times(64, 100, bucket_mb, backward_s=0.005, network=network)
        buckets = chain_buckets(64, bucket_mb, layers=100)
        sizes = [sum(bucket.values()) for bucket in buckets]
        all_s = network.seconds(sum(sizes), len(sizes))
        assert max(all_s, 0.005 + network.seconds(sizes[-1])) <= end <= 0.005 + all_s + 1e-9
