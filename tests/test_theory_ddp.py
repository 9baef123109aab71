"""labkit.theory.ddp: by hand, and against the code of PyTorch that it describes."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._inductor.fx_passes import ddp_fusion

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
