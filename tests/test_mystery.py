"""Lab 7's mystery runs: a scripted expert, which knows no fault, solves them with three tools; none leaves a process.

``benchmarks/mystery.py`` holds the expert and asks 200 seeds.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixture_long import long_but
from fixture_speed import slowness

from labkit_course.checks import mystery
from labkit_course.checks.mystery import (
    CAUSES,
    MOST_TOOLS,
    NO_FAULT,
    TOOLS,
    Findings,
    HealthyRun,
    KnownFault,
    Mystery,
    judge_diagnosis,
)
from labkit_course.checks.ranks.mystery import ALL_RANKS, RANKS, Config, Fault, Trainer, draw_fault

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "mystery.py"
SEEDS = {cause: [seed for seed in range(400) if draw_fault(seed).cause == cause] for cause in CAUSES}
"""The seeds of each kind of fault."""
CASES = [seed for cause in CAUSES for seed in SEEDS[cause][:4]]
DAILY = [SEEDS[cause][0] for cause in CAUSES]


@pytest.fixture(scope="module")
def expert():
    spec = importlib.util.spec_from_file_location("mystery_expert", PATH)
    module = sys.modules["mystery_expert"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ[module.TAG] = f"{os.getpid()}"
    yield module
    del os.environ[module.TAG], sys.modules["mystery_expert"]


@pytest.mark.parametrize("seed", long_but(DAILY, CASES))
def test_an_expert_solves_it_with_three_tools_and_no_process_is_left(seed, expert):
    start = time.monotonic()
    case = Mystery(seed)
    took_s = time.monotonic() - start
    # The expert gets the text that a learner reads, and nothing that knows the fault.
    with pytest.MonkeyPatch.context() as patch:
        for module in (mystery, sys.modules[draw_fault.__module__]):
            patch.delattr(module, "draw_fault")
        patch.delattr(Fault, "lines")
        named = expert.diagnose(case)
    assert judge_diagnosis(seed, named).ok, (draw_fault(seed), named, case, case.asked)
    assert 1 <= len(case.asked) <= MOST_TOOLS and took_s < 20 * slowness()  # 6 to 10 alone
    assert expert.processes_of_runs() == []


def test_a_process_that_a_run_leaves_is_seen(expert):
    given = {expert.TAG: os.environ[expert.TAG], expert.ENV_RUN_FOLDER: "/a/run"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | given) as left:
        assert expert.processes_of_runs() == [left.pid]
        left.communicate()
    assert expert.processes_of_runs() == []


def test_a_seed_always_draws_the_same_fault_and_all_kinds_and_ranks_occur():
    faults = [draw_fault(seed) for seed in range(400)]
    assert faults == [draw_fault(seed) for seed in range(400)]
    assert {fault.cause for fault in faults} == set(CAUSES) and len(CAUSES) >= 12
    for cause in CAUSES:
        ranks = {fault.rank for fault in faults if fault.cause == cause}
        assert ranks == ({None} if cause in ALL_RANKS else set(range(RANKS))), cause


def test_a_fourth_tool_is_refused_and_a_second_look_is_free(capsys):
    case = Mystery.__new__(Mystery)
    case.seed, case.asked, case._seen = 3, [], Findings(Path("nowhere"), [])
    case.ask()
    printed = capsys.readouterr().out
    assert all(tool in printed for tool in TOOLS) and case.asked == []
    for tool in ("ends", "logs", "stacks", "ends"):
        case.ask(tool)
    assert capsys.readouterr().out.count("left no such trace") == 4
    case.ask("weights")
    assert capsys.readouterr().out == "You have asked ends, logs, stacks: now name the rank and the cause.\n"
    assert case.asked == ["ends", "logs", "stacks"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((3, "slow link", "links: rank 3 → 2"), "passed: mystery 6: rank 3"),
        ((3, "slow link", " links:  rank 3 →  2 "), "passed: mystery 6: rank 3"),
        ((3, "slow link", "links: rank 2 → 3"), "wrong: mystery 6: rank 3, 'slow link' is right, 'links: rank 2"),
        ((3, "slow link", "times: rank 2"), "wrong: mystery 6: rank 3, 'slow link' is right, 'times: rank 2' does not"),
        (
            (3, "slow link", "60 ms"),
            "wrong: mystery 6: rank 3, 'slow link' is right, '60 ms' is not the line of a tool",
        ),
        ((3, "slow link", None), "wrong: mystery 6: rank 3, 'slow link' is right, 'None' is not the line of a tool"),
        ((2, "slow link", ""), "wrong: mystery 6: 'slow link' is right, rank 2 is not"),
        ((3, "straggler", ""), "wrong: mystery 6: rank 3 is right, 'straggler' is not"),
        ((None, "nan", ""), "wrong: mystery 6: neither no single rank nor 'nan'"),
        ((True, "slow link", ""), "wrong: mystery 6: 'slow link' is right, rank True is not"),
        ((3, ["slow link"], ""), "wrong: mystery 6: ['slow link'] is none of the causes"),
        ((3, "slow link"), "wrong: mystery 6: (3, 'slow link') is not (rank, cause, line)"),
        ("slow link", "wrong: mystery 6: 'slow link' is not (rank, cause, line)"),
    ],
)
def test_a_verdict_says_what_of_a_diagnosis_is_right(named, said):
    assert repr(judge_diagnosis(6, named)).startswith(said)


def test_every_fault_has_a_line_of_evidence_that_a_tool_prints():
    for seed in range(400):
        lines = draw_fault(seed).lines()
        assert lines and {line.partition(": ")[0] for line in lines} <= set(TOOLS)


def test_the_lab_asks_for_causes_that_its_sections_have_not_shown():
    text = (PATH.parents[1] / "notebooks" / "src" / "07_when_it_breaks.py").read_text()
    (last,) = re.findall(r"^SEED: int = (\d+)", text, re.MULTILINE)
    shown = set(re.findall(r'KnownFault\("([a-z ]+)"', text))
    shown |= {draw_fault(int(seed)).cause for seed in re.findall(r"Mystery\((\d+), beside", text)}
    assert len(shown) >= 7
    # Mysteries 45 and 48 have causes that sections 2 and 3 show: in 45 the aborted rank is the guilty one, and the
    # stacks of 48 resemble those of 17.
    assert not shown & {draw_fault(seed).cause for seed in (17, 23, int(last))}


def test_a_known_fault_shows_a_healthy_run_as_well_if_it_has_one(monkeypatch, capsys):
    def without_ranks(cause, **fault):
        found = Findings(Path("nowhere"), [])
        found.lines["log"] = [["step 0: loss 1.250" if cause == NO_FAULT else "step 0: loss nan"]] * RANKS
        return found

    monkeypatch.setattr(mystery, "run_with_fault", without_ranks)
    for healthy, beside in ((HealthyRun(), [0, RANKS]), (None, [0])):
        case = KnownFault("nan", rank=2, healthy=healthy)
        case.asked = ["losses"]  # or it would print a symptom, for which a run is needed
        case.ask("losses")
        printed = capsys.readouterr().out.split("healthy, same data:")
        assert [text.count("1.250") for text in printed] == beside and "nan" in printed[0]


def test_a_known_fault_may_be_asked_every_tool_and_names_itself(capsys):
    case = KnownFault("nan", rank=2)
    assert repr(case).startswith("'nan' on rank 2. The run ended.")
    labelled, bare = case.calls(labels=True), case.calls(labels=False)
    assert labelled[0][:2] == [("0.2", "all_reduce", "(12, 12) float32"), ("0.1", "all_reduce", "(12, 12) float32")]
    assert bare == [[call[1:] for call in calls] for calls in labelled] and set(map(len, bare)) == {8 * 3}
    assert set(case.table("samples")["shared with"]) == {"–"}
    for tool in TOOLS:
        case.ask(tool)
    printed = capsys.readouterr().out
    assert printed.count("Known fault: 'nan' on rank 2") == len(TOOLS) and "You have asked" not in printed
    assert case.table("losses").loc["step 3"].tolist().index("nan") == 2
    with pytest.raises(ValueError, match="is known"):
        case.name(2, "nan", "losses: step 3")


@pytest.mark.parametrize("cause", ["wrong scale", "hunger"])
def test_a_known_fault_of_a_rank_is_one_of_a_single_rank(cause):
    with pytest.raises(ValueError, match="is no fault of one rank; choose one of left out, "):
        KnownFault(cause, rank=0)


@pytest.mark.parametrize("cause", ["left out", "hunger"])
def test_a_known_fault_without_a_rank_is_one_of_all(cause):
    with pytest.raises(ValueError, match="is no fault of all ranks; choose one of same samples, wrong scale"):
        KnownFault(cause)


def test_a_known_fault_may_be_of_all_ranks():
    case = KnownFault("wrong scale")
    assert repr(case).startswith("'wrong scale' on all ranks. The run ended.")
    assert set(case.table("gradients")["factor"]) == {"4.000"}


def test_each_mystery_has_data_of_its_own():
    first, second = (Trainer(0, Fault("killed", 0, 3, 0), None, seed) for seed in (1, 2))
    assert not first.inputs.equal(second.inputs) and not first.order.equal(second.order)
    assert first.inputs.equal(Trainer(1, Fault("killed", 0, 3, 0), None, 1).inputs)


def test_the_table_of_a_mystery_holds_only_what_was_asked():
    case = Mystery.__new__(Mystery)
    case.seed, case.asked, case._seen = 3, [], Findings(Path("nowhere"), [])
    with pytest.raises(ValueError, match=r"ask\('logs'\) first"):
        case.table("logs")
    case.ask("logs")
    assert case.table("logs").empty


def test_a_link_is_timed_one_way_and_only_one_is_slow():
    # A question and its answer would show 60 ms both ways.
    links = KnownFault("slow link", rank=2).table("links")["ms"].astype(float)
    assert len(links) == 2 * RANKS and links[links > 50].index.tolist() == ["rank 2 → 3"]


def test_a_healthy_run_has_no_fault_and_shows_every_tool_in_a_fold():
    fault = Config(cause=NO_FAULT).fault()
    ranks = [Trainer(index, fault, None, 0) for index in range(RANKS)]
    assert not any(trainer.has(cause) for trainer in ranks for cause in CAUSES)
    case = HealthyRun.__new__(HealthyRun)
    case._seen = Findings(Path("nowhere"), [])
    times = dict.fromkeys(("step ms", "swap ms", "compute ms", "reduce ms"), 20.0)
    numbers = {"times": times, "losses": [1.0], "gradient": [1.0, 0.0], "samples": [1], "start": [1.0], "end": [1.0]}
    case._seen.found = [numbers] * RANKS
    shown = case._repr_html_()
    assert shown.startswith("<details><summary>") and all(f"\n{tool}: " in shown for tool in TOOLS)


def test_the_log_of_an_aborted_rank_ends_with_the_sizes_that_gloo_compared(tmp_path):
    run, found = tmp_path / "run", tmp_path / "found"
    for folder in (run, found):
        folder.mkdir()
    what = (
        "what():  [enforce fail at /a/pair.cc:456] a.length <= a.nbytes. 144 vs 72. Received data size doesn't match.\n"
    )
    for index, text in enumerate(("noise 1 vs 2\n", what)):
        (run / f"rank_{index:05d}.log").write_text(text)
        (found / f"log_{index}.txt").write_text("step 3: loss 1.000\n")
        mystery._keep_last_words(run / "rank_00000.log", found, index)
    logs = Findings(found, []).table("logs")["last lines"].tolist()
    assert logs[:2] == ["step 3: loss 1.000", "step 3: loss 1.000 / Received data size doesn't match: 144 vs 72 bytes"]


def test_a_healthy_run_is_shown_beside_on_the_same_data_in_the_same_rows(capsys):
    case = Mystery(23, beside=True)
    case.ask("samples")
    text, healthy = capsys.readouterr().out.split("healthy, same data:\n")
    assert text.splitlines()[2].split()[:8] == healthy.splitlines()[1].split()[:8]
    assert healthy.count("–") == RANKS and "–" not in text
    case.ask("record")
    text, healthy = capsys.readouterr().out.split("healthy, same data:\n")
    assert "call 23" in text and healthy.split()[-1] == text.split()[-1]
    assert set(case.healthy.table("ends")["status"]) == {0}
    rows = KnownFault("left out", rank=1).table("record")
    shown = case.healthy.text_beside("record", rows)
    assert all(f"\n{row} " in shown for row in rows.index)
    assert "no stacks" in case.healthy.text_beside("stacks", rows)
