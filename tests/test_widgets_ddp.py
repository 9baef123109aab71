"""The explorer of lab 4: every control alone, and what it predicts against real ranks."""

import pytest
from fixture_cells import run_cells
from matplotlib.figure import Figure

import labkit
from labkit.widgets import Buckets

EVERY = [(name, value) for name, control in Buckets.controls.items() for _, value in control.options]


def drawn(explorer, **chosen):
    explorer.chosen |= chosen
    return explorer.draw(Figure(), explorer.predicted, explorer.result, **explorer.chosen)


@pytest.mark.parametrize(("name", "value"), EVERY)
def test_every_value_of_every_control_is_predicted_and_drawn(name, value):
    explorer = Buckets()
    said = drawn(explorer, **{name: value})
    assert said == drawn(explorer), "the sentence is the same every time"
    assert f"{explorer.predicted['all_reduce_count']} bucket" in said


def test_the_sentence_says_what_theory_says():
    explorer = Buckets()
    assert drawn(explorer) == (
        "15 buckets, 1.66 MB; the backward pass is predicted to take 7.33 ms, of which 2.33 ms are exposed messages"
    )
    assert "take 5.17 ms, of which 0.175 ms are exposed" in drawn(explorer, hidden=True), "the last bucket"
    assert drawn(explorer, bucket_mb=100.0).startswith("1 bucket, ")


@pytest.mark.alone
@pytest.mark.parametrize("chosen", [{}, {"network": (24, 256), "bucket_mb": 1.0}], ids=["default", "wider"])
def test_what_is_predicted_is_measured(chosen):
    explorer = Buckets()
    explorer.chosen |= chosen
    ratios = []
    for _ in range(3):  # what disturbs a machine for a moment can only spoil a time
        result = explorer.run_it()
        for name, said in explorer.predict(**explorer.chosen).items():
            assert result.value(name) == said
        ratios.append(explorer.predicted["backward_ms"] / result.value("backward_ms"))
        if 1 / 1.5 < ratios[-1] < 1.5:
            break
    else:
        pytest.fail(f"predicted to measured: {ratios}")
    assert "; it took" in drawn(explorer)


def test_costs_are_timed_beside_steps_and_not_counted():
    (result,) = run_cells("ddp_compile", 2, [{"mode": "ddp", "dim": 8, "steps": 2, "costs": True}])
    assert {"alone_ms", "pieces_1_ms", "pieces_64_ms"} <= set(result.summary())
    assert (result.value("all_reduce_count"), result.value("all_reduce_bytes")) == (1, 4 * 4 * (64 + 8))


@pytest.mark.parametrize("other", [{}, {"mode": "ddp", "case": "bf16"}, {"mode": "ddp", "check": "parity"}])
def test_costs_are_those_of_the_reducer(other):
    with pytest.raises(labkit.ParameterError, match="use mode ddp, case cpu, check none and no race"):
        labkit.run("ddp_compile", costs=True, **other)


def test_the_answer_of_the_lab_is_what_the_explorer_shows():
    explorer, times_ms = Buckets(), {}
    for label, size in explorer.controls["bucket_mb"].options:
        said = drawn(explorer, hidden=True, alpha_us=100, bucket_mb=size)
        times_ms[label] = float(said.partition("predicted to take ")[2].partition(" ms")[0])
    assert min(times_ms, key=times_ms.get) == "0.1 MiB"
    assert times_ms["one gradient"] > 4 * 5 and times_ms["100 MiB"] > times_ms["1 MiB"]
