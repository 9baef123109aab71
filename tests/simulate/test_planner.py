"""labkit.plan: every row is what simulate says, refusals are the program's, an interrupt keeps what is known."""

import re
import signal
import time
from functools import partial
from pathlib import Path

import pandas
import psutil
import pytest
from fixture_long import long_but

import labkit
from labkit.__main__ import main
from labkit.environment import ENV_RUN_FOLDER
from labkit.errors import LabError
from labkit.launcher.progress import Display, use_display
from labkit.runs.folder import runs_folder
from labkit_simulate.extrapolate import SMALL_BLOCK_COUNTS, candidates_to_simulate_whole
from labkit_simulate.memory_fit import GIB, memory_fit
from labkit_simulate.planner import largest_fitting_value
from labkit_simulate.search_result import Candidate, SearchResult
from labkit_simulate.theory.allocator import OUTSIDE_ALLOCATOR_BYTES

TINY = {"model": "tiny", "layers": 1, "sequence": 512}
PROGRAM = """
import time
from dataclasses import dataclass
from typing import Literal
import torch
from labkit import rank

@dataclass
class Config:
    mode: Literal["trains", "fails", "hangs"] = "trains"
    "What comes of it."
    dim: int = 8
    "Width."

    def validate(self, world_size):
        if self.dim % world_size:
            raise ValueError(f"{world_size} ranks cannot share {self.dim}: take a multiple")

def main(config):
    with rank.session() as here:
        if config.mode == "fails":
            raise RuntimeError("no such luck\\nat all")
        if config.mode == "hangs":
            time.sleep(60)
        model = torch.nn.Linear(config.dim, config.dim)
        optimizer = torch.optim.SGD(model.parameters())
        for step in here.steps(1, track=[model, optimizer]):
            model(torch.ones(1, config.dim)).sum().backward()
            optimizer.step()

if __name__ == "__main__":
    rank.run_main(main, Config)
"""


@pytest.fixture(scope="module")
def found():
    """Of 2 x 3 candidates two are refused; the others are simulated, for two kinds of hosts."""
    before = set(runs_folder().glob("*"))
    lists = {"world_size": [8, 16], "tp": [1, 2, 16], "hardware": ["h100-8x", "a100-8x"]}
    one = {"hybrid": None, "checkpointing": "none", "precision": "bf16", "samples": 16, "dollars_per_hour": 3.0}
    plan = labkit.plan(**TINY, **one, **lists)
    runs = [folder for folder in set(runs_folder().glob("*")) - before if (folder / "run.json").exists()]
    return plan, len(runs)


def test_every_row_is_what_simulate_says_and_nothing_is_simulated_twice(found):
    plan, runs = found
    rows = plan.frame[plan.frame["step_s"].notna()]
    accepted = rows["candidate"].nunique()
    assert len(rows) == 2 * accepted == 2 * runs == 8
    for row in (rows.iloc[0], rows[rows["hardware"] == "a100-8x"].iloc[-1]):
        result = labkit.simulate(
            "decoder", hardware=row["hardware"], **plan.simulate_arguments(row["candidate"]), warm=True
        )
        assert row["peak_bytes"] == result.value("peak_total_bytes")
        assert row["reserved_bytes"] == result.value("gpu_reserved_bytes")
        for name in ("step_s", "step_low_s", "step_high_s", "compute_s", "exposed_s"):
            assert row[name] == result.value(f"reckoned_{name}")
        assert row["mfu"] == result.value("reckoned_model_flops_share")


def test_all_train_with_the_same_samples_and_the_fastest_comes_first(found):
    plan, _ = found
    rows = plan.fitting_rows
    assert list(rows["step_s"]) == sorted(rows["step_s"]) and plan.best["step_s"] == rows["step_s"].min()
    for row in rows.to_dict("records"):
        assert row["batch"] * row["world_size"] // row["tp"] == 16 == row["samples"]
        assert row["tokens_per_s"] == pytest.approx(16 * 512 / row["step_s"])
        assert row["dollars_per_step"] == pytest.approx(3.0 * row["world_size"] * row["step_s"] / 3600)
        assert row["dollars_per_million_tokens"] == pytest.approx(row["dollars_per_step"] / (16 * 512e-6))
    assert plan.cheapest["dollars_per_step"] == rows["dollars_per_step"].min()


def test_ranges_that_overlap_are_not_told_apart_and_others_are():
    def plan(*steps):
        times = {"compute_s": 1.0, "exposed_s": 0.0, "mfu": 0.4, "memory_bytes": 80 * 2**30}
        candidates = [
            Candidate(
                8,
                {"tp": tp},
                reason="",
                sizes={"peak": 1, "reserved": 1, "ahead": 0},
                times={"h100-8x": times | {"step_low_s": low, "step_s": step, "step_high_s": high}},
            )
            for tp, (low, step, high) in enumerate(steps)
        ]
        return SearchResult("decoder", ["tp"], candidates)

    near = plan((0.9, 1.0, 1.2), (1.1, 1.3, 1.5), (1.3, 1.4, 1.5))
    assert list(near.untold_rows["tp"]) == [1]
    assert "the first is not told apart from 1 others" in repr(near) and "at most" in repr(near)
    assert "told apart" not in repr(plan((0.9, 1.0, 1.2), (1.3, 1.4, 1.5)))


def test_what_the_program_refuses_is_a_row_in_its_own_words(found):
    plan, _ = found
    refused = plan.frame[plan.frame["step_s"].isna()]
    assert {(row["world_size"], row["tp"]) for row in refused.to_dict("records")} >= {(8, 16)}
    assert any("8 ranks cannot be cut into lines of tp = 16" in reason for reason in refused["reason"])
    assert "8 ranks cannot be cut into lines of tp = 16" in repr(plan) and "tokens/s" in plan._repr_html_()


def test_a_plan_is_read_from_its_folder_and_asked_under_another_budget(found):
    plan, _ = found
    again = labkit.SearchResult.load(plan.folder)
    assert again.frame.equals(plan.frame) and repr(again) == repr(plan)
    least, most = (plan.fitting_rows["reserved_bytes"] + sum(OUTSIDE_ALLOCATOR_BYTES.values())).agg(
        ["min", "max"]
    ) / 2**30
    assert len(again.with_limits(budget_gib=most).fitting_rows) == len(plan.fitting_rows)
    assert len(again.with_limits(budget_gib=(least + most) / 2).fitting_rows) < len(plan.fitting_rows)
    nothing = again.with_limits(budget_gib=0.5)
    with pytest.raises(LabError, match=r"nothing fits\n.* do not fit: .* to .* of memory are missing"):
        _ = nothing.best


@pytest.fixture(scope="module")
def deep():
    """Thirteen blocks, continued but for the best one, and the same simulated whole."""
    one = {"world_size": 8, "hybrid": None, "precision": "bf16", "model": "tiny", "layers": 13, "sequence": 512}
    lists = {"tp": [1, 2], "checkpointing": ["none", "full"], "hardware": ["h100-8x", "a100-8x"]}
    return labkit.plan(**one, **lists, whole=1), labkit.plan(**one, **lists, whole=None)


@pytest.mark.long  # the fixture takes 15 s
def test_a_deep_model_is_continued_to_what_it_is_whole(deep):
    some, whole = deep
    assert sum(bool(each.continued_from) for each in some.candidates) >= 2
    for line, full in zip(some.candidates, whole.candidates, strict=True):
        assert line.continued_from in ([], list(SMALL_BLOCK_COUNTS)) and full.continued_from == []
        assert line.sizes["peak"] == full.sizes["peak"] and line.sizes["ahead"] == full.sizes["ahead"]
        assert line.sizes["reserved"] == pytest.approx(full.sizes["reserved"], rel=0.5)
        assert line.peak_in == full.peak_in and line.note == ""
        for name in ("h100-8x", "a100-8x"):
            assert line.times[name] == pytest.approx(full.times[name], rel=1e-9)


@pytest.mark.long  # the fixture takes 15 s
def test_the_best_of_deep_models_are_whole_and_the_table_says_which_are_not(deep):
    some, _ = deep
    first = some.fitting_rows.groupby("hardware").head(1)
    assert first["whole"].all() and len(first) == 2 and not some.frame["whole"].all()
    count = sum(bool(each.continued_from) for each in some.candidates)
    assert f"{count} of 4 continued from 4 and 6 blocks, reserved memory estimated" in repr(some)
    assert re.findall(r"continued$|whole$", repr(some), re.MULTILINE)[0] == "whole"
    assert some.load_simulation(some.best["candidate"]).value("peak_total_bytes") == some.best["peak_bytes"]
    line = next(place for place, each in enumerate(some.candidates) if each.continued_from)
    with pytest.raises(labkit.ParameterError, match=rf"continued from \[4, 6\] blocks, simulate it .*\({line}\)"):
        some.load_simulation(line)
    assert labkit.SearchResult.load(some.folder).frame.equals(some.frame)


@pytest.mark.long  # the fixture takes 15 s
def test_what_only_the_estimate_keeps_out_is_simulated_whole(deep):
    some, _ = deep
    lines = some.frame[~some.frame["whole"]]
    least = lines.loc[lines["needed_bytes"].idxmin()]
    short = some.with_limits(budget_gib=(least["needed_bytes"] - 1) / GIB)
    assert not short.frame.query(f"candidate == {least['candidate']}")["fits"].any()
    assert least["candidate"] in candidates_to_simulate_whole(short, 4)
    nothing = some.with_limits(budget_gib=(least["needed_bytes"] - least["reserved_bytes"]) / GIB)
    assert candidates_to_simulate_whole(nothing, 4) == []


MOVES = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from labkit import rank

@dataclass
class Config:
    layers: int = 16
    "Equal blocks."
    before: int = 0
    "Blocks whose parameters take as much as what is held before the step's first."
    ALIKE: ClassVar[str] = "layers"

    def blocks(self):
        return self.layers

def main(config):
    with rank.session() as here:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(config.layers)))
        optimizer = torch.optim.SGD(model.parameters())
        for step in here.steps(1, track=[model, optimizer]):
            optimizer.zero_grad()
            with step.span("forward"):
                passing = torch.ones(config.before, 64, 64)
                del passing
                loss = model(torch.ones(1, 64)).sum()
            with step.span("backward"):
                loss.backward()
            optimizer.step()

if __name__ == "__main__":
    rank.run_main(main, Config)
"""


@pytest.mark.long
def test_a_peak_that_moves_as_a_model_gets_deeper_is_noticed(tmp_path):
    path = tmp_path / "moves.py"
    path.write_text(MOVES)
    found = labkit.plan(path, world_size=8, before=[0, 5, 8], whole=1)
    stays, between, later = found.candidates
    assert (stays.continued_from, stays.note) == ([], "")
    assert between.continued_from == [], "not among the best, but its two peaks are at different moments"
    assert later.continued_from == [4, 6] and later.peak_in == "forward root"
    found = labkit.plan(path, world_size=8, before=[0, 8, 20], whole=2)
    stays, later, _ = found.candidates
    assert (stays.note, later.continued_from, later.peak_in) == ("", [], "backward 0")
    assert re.fullmatch(r"peak \+\d+% of what was continued", later.note)
    assert f"1 simulated whole are not as continued ({later.note})" in repr(found)
    assert stays.sizes["peak"] == later.sizes["peak"], "deep enough that the first moment does not matter"
    assert labkit.SearchResult.load(found.folder).frame.equals(found.frame)
    few = labkit.plan(path, world_size=8, before=[0, 8], whole=2)
    assert few.frame["whole"].all() and "note" not in few.frame, "no more than have to be whole anyway"


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(PROGRAM)
    return path


def test_one_that_fails_is_a_row_with_its_reason(program):
    plan = labkit.plan(program, mode=["fails", "trains"], world_size=[8, 16])
    reasons = [candidate.reason for candidate in plan.candidates]
    assert reasons[:2] == ["rank 0 failed: RuntimeError: no such luck", ""]
    assert all("16 ranks cannot share 8: take a multiple" in reason for reason in reasons[2:])
    assert len(plan.fitting_rows) == 1 and plan.best["mode"] == "trains"
    assert labkit.SearchResult.load(plan.folder).frame.equals(plan.frame)


def test_what_hardware_cannot_compute_is_a_row_too():
    how = TINY | {"tp": 1, "hybrid": None, "checkpointing": "none", "world_size": 2}
    plan = labkit.plan(**how, hardware=["h100-8x", "laptop"], precision=["bf16", "float32"])
    assert [bool(candidate.reason) for candidate in plan.candidates] == [True, False]
    assert "no rate for 'bfloat16' numbers on laptop" in plan.candidates[0].reason
    assert plan.hardware_names == ["h100-8x", "laptop"] and set(plan.fitting_rows["precision"]) == {"float32"}


class Impatient(Display):
    """Presses Ctrl-C once one has ended and another one runs."""

    pressed = 0.0

    def show(self, state, lines):
        running = any(process.info["environ"] for process in running_ranks())
        if state.done_steps and running and not self.pressed:
            self.pressed = time.monotonic()
            signal.raise_signal(signal.SIGINT)


def running_ranks():
    """Processes of runs in the folder of this test's runs."""
    for process in psutil.process_iter(["environ"]):
        if str((process.info["environ"] or {}).get(ENV_RUN_FOLDER, "")).startswith(str(runs_folder())):
            yield process


def test_an_interrupt_ends_all_within_two_seconds_and_keeps_what_is_known(program, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    display = Impatient()
    with use_display(display), pytest.raises(KeyboardInterrupt) as interrupted:
        labkit.plan(program, mode=["trains", "hangs"], dim=[8, 16, 24], world_size=8)
    assert 0 < time.monotonic() - display.pressed < 2
    assert list(running_ranks()) == []
    kept = eval(str(interrupted.value).partition("is kept: ")[2])
    assert len(kept.fitting_rows) >= 1 and "not simulated yet" in set(kept.frame["reason"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tp": list(range(1, 300))}, "299 tp .* candidates, but 1 to 100 are allowed"),
        ({"tp": []}, "0 tp .* = 0 candidates"),
        ({"tpp": [1, 2]}, "no parameter is called 'tpp'; did you mean 'tp'"),
        ({"hardware": "abacus"}, "hardware 'abacus' is none of"),
        ({"world_size": 12}, "the program accepts no candidate; of the first it says: 12 ranks do not fill hosts of 8"),
        ({"samples": 10, "tp": 1}, r"64 ranks cannot share samples = 10: 10 % 64 = 10"),
        ({"limit": 0}, "limit = 0 is not a number of candidates"),
        ({"whole": 0}, "whole = 0 is not a number of candidates"),
        ({"budget_gib": float("nan")}, "budget_gib = nan: give a positive number of GiB, or None"),
        ({"dollars_per_hour": "free"}, "dollars_per_hour = 'free': give a positive number of dollars"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_starts(wrong, words):
    before = set(runs_folder().glob("*"))
    with pytest.raises(labkit.ParameterError, match=words):
        labkit.plan(**{"model": "tiny", "checkpointing": "none", "precision": "bf16"} | wrong)
    assert set(runs_folder().glob("*")) == before


@pytest.mark.long
def test_the_largest_batch_fits_and_one_more_does_not():
    how = TINY | {"world_size": 8, "hardware": "h100-8x"}
    three = labkit.simulate("decoder", **how, batch=3, warm=True)
    budget_gib = (three.value("gpu_reserved_bytes") + sum(OUTSIDE_ALLOCATOR_BYTES.values())) / 2**30
    most = largest_fitting_value("batch", **how, budget_gib=budget_gib)
    assert most >= 3 and memory_fit(labkit.simulate("decoder", **how, batch=most, warm=True), budget_gib)
    assert not memory_fit(labkit.simulate("decoder", **how, batch=most + 1, warm=True), budget_gib)
    assert largest_fitting_value("batch", **how, budget_gib=1.0) == 0
    assert largest_fitting_value("batch", **how, at_most=1) == 1


def test_the_command_line_plans(capsys):
    words = "--model tiny --layers 1 --sequence 16 --world-size 8 --hybrid None --checkpointing none --precision bf16"
    assert main(["plan", "decoder", *words.split(), "--tp", "1", "3", "--reshard", "True"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 fit in the memory of a device" in shown and "8 ranks cannot be cut into lines of tp = 3" in shown
    assert main(["plan", "decoder", "--tp", "3"]) == 2


def asked_in_the_docs():
    """The questions of docs/simulation.md, and their calls."""
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text().partition("### What people ask")[2]
    rows = re.findall(r"^\| (.*\?.*) \| `(.*)` \|$", text.partition("\n## ")[0], re.MULTILINE)
    return {question: call.replace(r"\|", "|") for question, call in rows}


def test_the_docs_answer_what_people_ask():
    assert len(asked_in_the_docs()) == 11


@pytest.mark.parametrize("question", long_but(list(asked_in_the_docs())[::2], asked_in_the_docs()))
def test_what_people_ask_is_one_call(question):
    job = {"model": "tiny", "layers": 1, "sequence": 256, "precision": "bf16", "checkpointing": "full"}
    names = {"job": job | {"hybrid": None, "tp": 1}, "on": {"world_size": 16, "hardware": "h100-8x"}}
    names |= {"labkit": labkit, "largest_fitting_value": partial(largest_fitting_value, at_most=2)}
    call = asked_in_the_docs()[question].replace("step=4096", "step=1").replace("[8, 64]", "[8, 16]")
    answer = eval(call, names)
    if isinstance(answer, pandas.DataFrame) and "peak_optstate_bytes" in answer:
        assert answer["peak_parameter_bytes"].item() > 0 < answer["peak_optstate_bytes"].item()
    elif isinstance(answer, pandas.DataFrame):
        assert len(answer) >= 2 and answer["fits"].all(), answer["reason"]
        assert len(answer.drop_duplicates(["step_s", "peak_bytes"])) > 1, "and it makes a difference"
    elif isinstance(answer, pandas.Series):
        assert answer.tolist() == ["backward blocks.0"]
    else:
        assert answer > 0


def test_a_disk_that_a_plan_fills_is_told(small_disk):
    (small_disk / "other").write_bytes(bytes(1024 * 1024 - 4096))
    with pytest.raises(LabError, match=r"No space left on device, .*; delete old runs .*LABKIT_RUNS"):
        SearchResult("decoder", ["x" * 10_000], [], None, None, folder=small_disk).save()
    assert [path.name for path in small_disk.iterdir()] == ["other"]
