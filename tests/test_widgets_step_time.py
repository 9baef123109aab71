"""The explorer of lab 6b: every control alone, what it draws against the estimate, and against a simulation."""

import pytest
from fixture_explorers import drawn, one_moved, sentence

from labkit_course.widgets import StepExplorer
from labkit_course.widgets.step_time import GPUS, estimate


@pytest.mark.parametrize("chosen", one_moved(StepExplorer), ids=str)
def test_every_value_of_every_control_is_drawn_as_it_is_estimated(chosen):
    figure, said = drawn(StepExplorer(), **chosen)
    step, few = estimate(**chosen), estimate(**(chosen | {"gpus": GPUS[0]}))
    above, below = figure.axes
    assert above.get_xlim()[1] == pytest.approx(1e3 * step.time.step_s)
    kept = step.tokens_per_s / few.tokens_per_s
    assert dict(zip(*below.lines[0].get_data(), strict=True))[chosen["gpus"]] == pytest.approx(kept)
    assert below.get_ylim()[0] == 0
    assert (
        f"keeps {kept:.0%} of the speed" in said and f"waits for {step.time.exposed_s / step.time.step_s:.0%}" in said
    )


def test_longer_latency_and_smaller_shares_cost_speed_and_more_tokens_hide_them():
    explorer = StepExplorer()
    kept = [
        int(sentence(explorer, latency_us=latency, share=share, tokens=tokens).partition(" keeps ")[2].split("%")[0])
        for latency, share, tokens in (
            (14, 1.0, 2048),
            (78, 1.0, 2048),
            (78, 0.5, 2048),
            (434, 1.0, 2048),
            (78, 1.0, 4096),
        )
    ]
    assert kept[0] > kept[1] > kept[2] > kept[3] and kept[4] > kept[1]


@pytest.mark.long  # the lab simulates the same steps
@pytest.mark.parametrize("gpus", [8, 1024])
def test_the_simulated_step_takes_as_long(gpus):
    explorer = StepExplorer()
    explorer.chosen |= {"gpus": gpus}
    result = explorer.run_current()
    for name, predicted in explorer.prediction.items():
        assert predicted == pytest.approx(result.value(name), rel=explorer.tolerances[name])
    assert "; the simulated step takes" in sentence(explorer)
