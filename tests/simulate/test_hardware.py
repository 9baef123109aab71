"""labkit_simulate.theory.hardware: each figure has a source, ranks share what they share, and errors list
what there is.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from fixture_long import long_but

import labkit
from labkit_simulate.theory.hardware import HARDWARE, Hardware, get_hardware

FIGURES = {field.name for field in dataclasses.fields(Hardware)} - {"name", "device", "shared", "sources"}


@pytest.mark.parametrize("name", HARDWARE)
def test_every_figure_has_its_source_and_is_positive(name):
    entry = get_hardware(name)
    assert set(entry.sources) == FIGURES and all(entry.sources.values())
    assert all("{" not in source for source in entry.sources.values())
    numbers = [entry.devices, entry.cards, entry.memory_bytes, entry.memory_bytes_per_s, *entry.flops_per_s.values()]
    assert min(numbers) > 0 and 0 < entry.matmul_share <= 1
    for link in (entry.inside, entry.between):
        assert 0 < link.alpha_s < 1e-3 and link.beta_s_per_byte > 0
    assert entry.between.beta_s_per_byte > entry.inside.beta_s_per_byte, "a network is slower than what is in a host"


def test_links_are_counted_in_one_direction_and_arithmetic_without_sparsity():
    entry = get_hardware("h100-8x")
    assert 1 / entry.inside.beta_s_per_byte == pytest.approx(450e9)  # the sheet's 900 GB/s are both directions
    assert 1 / entry.between.beta_s_per_byte == pytest.approx(0.95 * 400e9 / 8)
    assert "not measured" in entry.sources["inside"] and "fitted" in get_hardware("a100-8x").sources["inside"]
    assert entry.peak_flops_per_s("bfloat16") == pytest.approx(989.4e12)


def test_a_gpu_without_tf32_multiplies_such_numbers_as_float32():
    assert get_hardware("v100-8x").peak_flops_per_s("tf32") == get_hardware("v100-8x").peak_flops_per_s("float32")
    assert get_hardware("a100-8x").peak_flops_per_s("tf32") == pytest.approx(156e12)


RECORDED = Path(__file__).resolve().parents[2] / "results" / "nvidia-h100-2026-11-27"


H100_ROWS = long_but(
    [("37", 0.02), ("40", 0.06)], [("35", 0.01), ("37", 0.02), ("38", 0.02), ("39", 0.12), ("40", 0.06)]
)


@pytest.mark.parametrize(("row", "limit"), H100_ROWS)
def test_steps_of_one_h100_are_met_with_one_share_of_its_peak(row, limit, tmp_path, monkeypatch):
    """Row 35 gave the share; depth, recomputation, batch and model of the others were not seen."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    recorded = json.loads((RECORDED / f"{row}.json").read_text())
    found = labkit.simulate("decoder", world_size=1, hardware="h100-1x", **recorded["params"])
    assert 1e3 * found.value("reckoned_step_s") == pytest.approx(recorded["step_ms"], rel=limit)
    reserved = found.value("gpu_reserved_bytes") / recorded["max_reserved_bytes"]
    assert 0.9 < reserved < 1, "what the allocator reserves is said 2 to 10 % too low"


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match=r"'h900-8x' is none of v100-8x, a100-8x, h100-8x.*laptop"):
        get_hardware("h900-8x")
    with pytest.raises(ValueError, match=r"'float4' numbers on a100-8x: it has float32, tf32, bfloat16"):
        get_hardware("a100-8x").peak_flops_per_s("float4")
    with pytest.raises(ValueError, match=r"no 'gpus': it has name, device, devices"):
        get_hardware("a100-8x", gpus=4)
    assert get_hardware("a100-8x", devices=4).devices == 4 and HARDWARE["a100-8x"].devices == 8


def test_ranks_have_a_gpu_each_and_share_cores():
    gpus, laptop = get_hardware("h100-8x"), get_hardware("laptop")
    assert gpus.for_rank(3) is gpus
    with pytest.raises(ValueError, match=r"9 ranks on a host of 8 devices \(h100-8x\): take 1 to 8"):
        gpus.for_rank(9)
    alone, crowded = laptop.for_rank(1), laptop.for_rank(4)
    assert (
        alone.peak_flops_per_s("float32")
        == 4 * crowded.peak_flops_per_s("float32")
        == 2 * laptop.peak_flops_per_s("float32")
    )
    assert alone.operator_s == laptop.for_rank(2).operator_s == crowded.operator_s / 2
    assert crowded.inside.beta_s_per_byte == 2 * laptop.inside.beta_s_per_byte
