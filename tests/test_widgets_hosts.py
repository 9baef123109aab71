"""The explorer of lab 8: every control alone, and what it predicts against ranks on two hosts."""

import pytest
from fixture_explorers import drawn, one_moved, sentence

from labkit_cluster import theory
from labkit_course.widgets import HostsExplorer


@pytest.mark.parametrize("chosen", one_moved(HostsExplorer), ids=str)
def test_every_value_of_every_control_is_drawn_as_long_as_the_step_takes(chosen):
    figure, said = drawn(HostsExplorer(), **chosen)
    how = {name: chosen[name] for name in ("hosts", "gpus", "cards", "tokens")}
    steps_ms = theory.step_ms(**how)
    (axes,) = figure.axes
    ends = {}
    for bar in axes.patches:
        ends[round(bar.get_y(), 3)] = max(ends.get(round(bar.get_y(), 3), 0), bar.get_x() + bar.get_width())
    assert sorted(ends.values()) == pytest.approx(sorted(steps_ms.values()))
    assert f"a step takes {steps_ms['fsdp'] / steps_ms['hsdp']:.2g} times as long under FSDP" in said


def test_the_numbers_of_the_lab_are_what_the_explorer_shows():
    explorer = HostsExplorer()
    assert sentence(explorer).endswith("a step takes 1.8 times as long under FSDP")
    assert sentence(explorer, cards=8).endswith("a step takes 1 times as long under FSDP")
    assert "are busy for 959 ms under FSDP and 635 ms under HSDP" in sentence(explorer, cards=1, hosts=128)


@pytest.mark.parametrize("chosen", [{"hosts": 8, "gpus": 2}, {"gpus": 8}], ids=str)
def test_what_this_machine_cannot_measure_is_refused_with_what_to_change(chosen):
    explorer = HostsExplorer()
    explorer.chosen |= chosen
    with pytest.raises(ValueError, match="to run it, take 2 hosts with 2 or 4 GPUs each"):
        explorer.run_current()


@pytest.mark.long  # the lab counts the same on two hosts
@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
def test_what_is_predicted_is_counted(way):
    explorer = HostsExplorer()
    explorer.chosen |= {"gpus": 2, "way": way}
    result = explorer.run_current()
    assert explorer.measured_value("leaving_times", result) == explorer.prediction["leaving_times"]
    assert "times the network's bytes" in sentence(explorer)
