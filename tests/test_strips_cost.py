"""labkit_course.strips_cost: the parts of a step in strips sum to what the emulation's own formula says."""

import pytest

from labkit.theory import emulated_steps, spatial
from labkit.theory.emulated import Emulated
from labkit_course import strips_cost

SMALL = {"depths": (2, 2), "dims": (16, 32)}
LINKS = {"near": 450e9, "far": 50e9}


def test_the_parts_of_a_step_are_what_emulated_ranks_wait_for():
    """In float32, as ranks emulate it, where only the mean's few bytes are left out."""
    hardware = Emulated(latency_us=3000, gb_per_s=0.01, forward_ms=50)
    expected_s = emulated_steps.spatial_step_s(hardware, height=32, width=256, batch=1, space=4, **SMALL)
    parts = strips_cost.parts_s(
        compute_s=0.6,
        ranks=4,
        blocks=4,
        halo_bytes=spatial.halo_bytes(rows=8, halo=3, channels=16, batch=1),
        gradient_bytes=4 * spatial.convnext_parameters(**SMALL, num_classes=10),
        latency_s=3e-3,
        bytes_per_s=0.01e9,
    )
    assert list(parts) == ["arithmetic", "halos", "gradients", "latency"]
    mean_s = 2 * (4 - 1) / 4 * 4 * 32 / 0.01e9
    assert sum(parts.values()) + mean_s == pytest.approx(expected_s, rel=1e-9)


def test_a_network_is_in_bfloat16_and_each_block_has_the_same_halo():
    step = strips_cost.convnext_step(256, **SMALL)
    halos = {stage.height * 3 * stage.channels * 2 for stage in spatial.convnext_stages(256, 256, **SMALL)}
    assert {step["halo_bytes"]} == halos
    assert step["gradient_bytes"] == 2 * spatial.convnext_parameters(**SMALL, num_classes=1000)
    # four times the pixels, and twice the rows
    larger = strips_cost.convnext_step(512, **SMALL)
    assert [larger[each] / step[each] for each in ("compute_s", "halo_bytes", "gradient_bytes")] == [4, 2, 1]


def test_the_table_has_the_learners_formula_or_the_sum_of_its_parts():
    ours = strips_cost.table_ms(None, (256, 512), LINKS, **SMALL)
    assert list(ours.index) == [
        "1: 256 pixels, near",
        "2: 256 pixels, far",
        "3: 512 pixels, near",
        "4: 512 pixels, far",
    ]
    assert list(ours["strips"]) == pytest.approx(list(ours.iloc[:, 3:].sum(axis=1)))
    ring_ms = ours["gradients"] + 14 * 0.01
    assert list(8 * ours["data parallel"]) == pytest.approx(list(ours["one device"] + ring_ms))
    theirs = strips_cost.table_ms(lambda **step: step["latency_s"], (256,), LINKS, **SMALL)
    assert list(theirs["strips"]) == pytest.approx([0.01, 0.01])
