"""labkit_course.checks.on_ranks: answers travel with what they use, and only what every rank sends home can pass."""

import contextlib
import functools
import linecache
import re
import tempfile
import threading

import cloudpickle
import pytest
import torch

import labkit
from labkit.errors import LabError
from labkit_course.checks import (
    collectives,
    extensions,
    extensions_at_work,
    fsdp_at_work,
    on_ranks,
    spatial,
    two_dim,
    two_dim_at_work,
)
from labkit_course.checks.ranks import answer_program

IMPORTS = "import os\nimport sys\nimport time\nimport torch\nfrom torch import distributed as dist\n\n\n"
ON_RANKS = {
    "halo_exchange": (spatial.halo_exchange, "strip, halo, rank, ranks", "strip.new_zeros(2, 3, 5, 14)"),
    "halo_gradient": (spatial.halo_gradient, "grad, halo, rank, ranks", "grad.new_zeros(2, 3, 5, 8)"),
    "expert_gradients": (fsdp_at_work.expert_gradients, "model, experts, ranks", "None"),
    "post_all_gather": (extensions_at_work.post_all_gather, "self, given, metadata, dtype, *, out=None", None),
    "eight_bit_gather": (
        extensions.eight_bit_gather,
        "given, dtype=None",
        "(torch.zeros_like(given, dtype=torch.int8),) if dtype is None else given[0].to(dtype)",
    ),
    "block_plan": (two_dim.block_plan, "", "{}"),
    "row_parallel": (two_dim.row_parallel, "layer, group", "layer"),
    "stack_plan": (two_dim_at_work.stack_plan, "", "{}"),
}
"""Checks on ranks: the parameters of their exercise, and a wrong answer that runs; None where there is none."""


@pytest.fixture
def verdict_on(answer_to):
    """The verdict on a body, which a check that takes two answers gets twice."""

    def judged(name, body, **more):
        check, parameters, _ = ON_RANKS[name]
        answer = answer_to(f"def answer({parameters}):", body, IMPORTS)
        return check(*[answer] * (2 if "gather" in name and name != "post_all_gather" else 1), **more)

    return judged


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", ON_RANKS)
@pytest.mark.parametrize("body", ["exit()", "sys.exit(0)", "raise SystemExit", "sys.exit(3)"])
def test_an_answer_that_leaves_is_wrong(name, body, verdict_on):
    said = "wrong: rank 0 ended before the function returned: does it call exit()?"
    assert repr(verdict_on(name, body)) == said


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_run_that_ends_well_passes_nothing_without_what_the_ranks_send(name, verdict_on, monkeypatch):
    monkeypatch.setattr(labkit, "run", lambda *args, **parameters: None)  # status 0, as os._exit(0) leaves it
    said = "wrong: rank 0 ended before the function returned: does it call exit()?"
    assert repr(verdict_on(name, "os._exit(0)")) == said


def test_the_word_of_a_single_rank_is_missed(verdict_on, ranks_at_hand, monkeypatch):
    run = labkit.run

    def forgetful(path, *, folder, **parameters):
        run(path, folder=folder, **parameters)
        answer_program.output_path(on_ranks.Path(folder), 3).unlink()

    monkeypatch.setattr(labkit, "run", forgetful)
    assert "rank 3 ended before" in verdict_on("halo_exchange", "return strip.new_zeros(2, 3, 5, 14)").detail


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("halo_exchange", "os._exit(0)"),
        ("expert_gradients", "if dist.get_rank() == 1:\n    os._exit(0)\ndist.all_reduce(torch.ones(1))"),
        ("stack_plan", "sys.exit(0)"),
    ],
)
def test_ranks_that_really_leave_have_not_passed(name, body, verdict_on):
    verdict = repr(verdict_on(name, body, timeout_s=60))
    assert verdict.endswith(" ended before the function returned: does it call exit()?")
    leaving = {1} if "== 1" in body else range(4)  # of several, any may be the first
    named = {int(word) for word in re.findall(r"\d+", verdict.split(" ended ")[0])}
    assert verdict.startswith("wrong: rank ") and named and named <= set(leaving)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", [name for name, (*_, value) in ON_RANKS.items() if value])
def test_an_answer_cannot_judge_itself(name, verdict_on):
    cheat = "torch.allclose = lambda *args, **kwargs: True\n"
    assert verdict_on(name, f"{cheat}return {ON_RANKS[name][2]}").state == "wrong"


HELPERS = """
import numpy as np
import torch
from torch import distributed as dist

WHAT = ["grad", "shared"]

def is_shared(parameter, experts):
    return parameter not in experts

def mean_of(tensor, ranks):
    dist.all_reduce(tensor)
    return tensor.div_(np.int64(ranks))

def average(model, experts, ranks):
    for parameter in model.parameters():
        gradient = getattr(parameter, WHAT[0])
        mean_of(gradient, ranks) if is_shared(parameter, experts) else gradient.div_(ranks)
"""


@pytest.fixture
def cells():
    """A function as a notebook has it, with what other cells define beside it."""
    names = {"__name__": "__main__"}
    exec(HELPERS, names)
    return names


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_answer_uses_helpers_and_imports_of_other_cells(cells):
    assert fsdp_at_work.expert_gradients(cells["average"]).ok


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_answer_may_be_a_lambda_or_a_partial_on_ranks_too(cells):
    average = cells["average"]
    assert fsdp_at_work.expert_gradients(lambda model, experts, ranks: average(model, experts, ranks)).ok
    assert fsdp_at_work.expert_gradients(functools.partial(average)).ok


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_answer_of_a_module_that_a_rank_cannot_import_travels_whole(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    (tmp_path / "only_here.py").unlink()
    assert fsdp_at_work.expert_gradients(only_here.average).ok
    assert "only_here" not in cloudpickle.list_registry_pickle_by_value()


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_answer_uses_a_module_beside_the_notebook(tmp_path, monkeypatch, cells):
    (tmp_path / "beside.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    cells["beside"] = beside
    exec("def average(model, experts, ranks):\n    beside.average(model, experts, ranks)", cells)
    assert fsdp_at_work.expert_gradients(cells["average"]).ok


LOCK = exit = threading.Lock()  # IPython's exit cannot travel either


UNSENT = "<lambda> cannot be sent to the ranks with what is used there: TypeError: cannot pickle '_thread.lock' object"


async def later(strip, halo, rank, ranks):
    return strip


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "wrong: None is no function: hand over the function by its name, without calling it"),
        (later, "wrong: later is an async function, which gives a coroutine when called: write def alone"),
        (lambda strip, halo, rank, ranks: None, "not attempted"),
        (
            lambda strip, halo, rank, ranks: LOCK,
            "wrong: UNSENT",
        ),
        (
            lambda strip, halo, rank, ranks: exit(),
            "wrong: UNSENT. Does it call exit()?",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_before_a_start(answer, said):
    assert repr(spatial.halo_exchange(answer)) == said.replace("UNSENT", UNSENT)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("strip.to('meta')", "a tensor without plain numbers: torch.strided, on meta"),
        ("strip.to_sparse()", "a tensor without plain numbers: torch.sparse_coo, on cpu"),
        (
            "strip.new_zeros(2, 3, 5, 14, dtype=torch.float64)",
            "on rank 0, the numbers are torch.float64, expected torch",
        ),
        ("strip.requires_grad_()[..., :1]", "the shape is (2, 3, 5, 1), expected (2, 3, 5, 14)"),
        ("10**5000", "on rank 0, the function returned int, not a tensor"),
        ("object()", "the function returned object, not a tensor"),
        ("torch.nn.Parameter(strip)", "the function returned a Parameter, not a plain tensor"),
    ],
)
def test_whatever_an_answer_gives_on_ranks_there_is_a_verdict(value, said, verdict_on):
    verdict = verdict_on("halo_exchange", f"return {value}")
    assert verdict.state == "wrong"
    assert said in repr(verdict)


def test_a_loop_without_an_end_is_told_from_ranks_that_wait_for_each_other(verdict_on):
    verdict = verdict_on("halo_exchange", "count = 0\nwhile True:\n    count += 1", timeout_s=6)
    assert repr(verdict) in {
        f"wrong: after 6 s rank 0 was still in line {line} of answer, `{text}`: when does its loop end?"
        for line, text in ((3, "while True:"), (4, "count += 1"))
    }


STACKS = """Thread 0x00007f1 (most recent call first):
  File "/torch/profiler.py", line 9 in run

Current thread 0x00007f2 (most recent call first):
{inner}  File "{file}", line {line} in answer
  File "/labkit_course/checks/ranks/spatial.py", line 33 in feed
"""
BODY = "for handle in []:\n    handle.wait()\ntime.sleep(0)"


@pytest.mark.parametrize(
    ("line", "inner", "said"),
    [
        (4, "", "after 8 s rank 1 was still in line 4 of answer, `time.sleep(0)`: when does its loop end?"),
        (3, "", "for 8 s, rank 1 in line 3 of answer, `handle.wait()`: does every send have its receive"),
        (4, '  File "/x/torch/distributed/distributed_c10d.py", line 5 in recv\n', "the ranks waited for each other"),
        (4, '  File "/x/helpers.py", line 5 in recv\n', "rank 1 was still in line 4 of answer"),
        (4, '  File "{file}", line {wait} in helper\n', "the ranks waited for each other"),
    ],
)
def test_the_stacks_of_a_run_without_an_end_say_why(line, inner, said, answer_to, monkeypatch):
    answer = answer_to("def answer(strip, halo, rank, ranks):", BODY, IMPORTS)
    file, first = answer.__code__.co_filename, answer.__code__.co_firstlineno
    assert linecache.getline(file, first + 3).strip() == "time.sleep(0)"

    def run(*args, **parameters):
        stack = STACKS.format(file=file, line=first + line - 1, inner=inner.format(file=file, wait=first + 2))
        raise labkit.RunTimedOut(8, {0: stack.replace("answer", "other"), 1: stack}, {})

    monkeypatch.setattr(labkit, "run", run)
    assert said in repr(spatial.halo_exchange(answer))


@pytest.mark.parametrize(
    ("stack", "judged"),
    [
        ("(this rank had not started its program yet)", False),
        ('Current thread 0x1 (most recent call first):\n  File "/torch/__init__.py", line 3 in <module>\n', False),
        ("(this rank had ended already)", True),
        ('Thread 0x1 (most recent call first):\n  File "/answer_program.py", line 3 in save_answer_output\n', True),
    ],
)
def test_an_answer_on_a_machine_that_is_too_busy_is_not_called_wrong(stack, judged, answer_to, monkeypatch):
    waits = 'Thread 0x2 (most recent call first):\n  File "/torch/distributed/c10d.py", line 3 in recv\n'

    def run(*args, **parameters):
        raise labkit.RunTimedOut(8, {0: waits, 1: stack}, {})

    monkeypatch.setattr(labkit, "run", run)
    verdict = spatial.halo_exchange(answer_to("def answer(strip, halo, rank, ranks):", BODY, IMPORTS))
    assert (verdict.state, verdict.ok) == ("wrong" if judged else "not judged", False)
    assert ("run the check again" in verdict.detail) == (not judged)


def test_what_is_sent_home_needs_no_code_of_a_rank(tmp_path):
    values = {"a": torch.ones(2, requires_grad=True), "b": [None, 3, "x"], "c": (torch.arange(6).view(2, 3).T,)}
    sent = answer_program.plain_cpu_copy(values)
    torch.save(sent, tmp_path / "sent")
    read = torch.load(tmp_path / "sent", weights_only=True)
    assert type(read["a"]) is torch.Tensor and not read["a"].requires_grad
    assert read["b"] == [None, 3, "x"] and read["c"][0].tolist() == [[0, 3], [1, 4], [2, 5]]


SWAP = """
arrived = torch.empty_like(mine)
handles = [dist.isend(mine, (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
for handle in handles:
    handle.wait()
"""


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("os.fork()", "the function forks: a rank is one process"),
        ("return torch.nn.Parameter(arrived)", "the function returned a Parameter, not a plain tensor"),
        ("dist.all_reduce(mine[:1000].clone())", "the numbers are right, but 404,000 bytes were sent"),
        ("dist.broadcast(mine[:1000].double(), 0)", "the numbers are right, but 408,000 bytes were sent"),
    ],
)
@pytest.mark.parametrize("thread", [False, True])
def test_what_an_answer_does_besides_is_seen_in_a_thread_too(more, said, thread, answer_to):
    if thread and not more.startswith("dist"):
        pytest.skip("only messages may hide in a thread")
    call = f"import threading\nhidden = threading.Thread(target=lambda: {more})\nhidden.start()\nhidden.join()"
    body = f"{SWAP}{call if thread else more}\nreturn arrived"
    answer = answer_to("def shift(mine, rank, ranks):", body, IMPORTS)
    assert said in collectives.shift(answer).detail


def test_ranks_that_wait_for_each_other_are_told_the_line(answer_to):
    body = "dist.send(mine, (rank + 1) % ranks)\ndist.recv(mine, (rank - 1) % ranks)\nreturn mine"
    answer = answer_to("def shift(mine, rank, ranks):", body, IMPORTS)
    seen = collectives.shift(answer, timeout_s=5).detail
    assert re.search(
        r"rank \d in line 2 of shift, `dist.send\(mine, \(rank \+ 1\) % ranks\)`: does each rank start its send",
        seen,
    )


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_disk_that_a_check_fills_is_no_wrong_answer(small_disk, monkeypatch, verdict_on, room):
    def run(program, **arguments):
        with contextlib.suppress(OSError):
            (small_disk / "more").write_bytes(bytes(room))
        raise labkit.RankFailed(0, "RuntimeError", "PytorchStreamWriter failed writing file", "", small_disk / "log")

    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    monkeypatch.setattr(labkit, "run", run)
    (small_disk / "other").write_bytes(bytes(1024 * 1024 - room))
    with pytest.raises(LabError, match=f"{small_disk}.*(is full: make room|No space left .*make room), or set TMPDIR"):
        verdict_on("halo_exchange", "return strip")
