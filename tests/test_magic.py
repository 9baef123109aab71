"""%%torchrun: a cell's code on real ranks, with their output, their values and their errors in terms of the cell."""

import re
import textwrap

import pytest
import torch
from fixture_messages import words
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit.launcher import magic, run
from labkit.launcher.progress import Display, use_display

GATHER = """
import torch.distributed as dist
dist.init_process_group()
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
"""


@pytest.fixture
def shell(monkeypatch):
    """An IPython in which labkit was imported."""
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    shell = InteractiveShell()
    labkit.load_ipython_extension(shell)
    return shell


@pytest.fixture
def cell(shell, capsys):
    """Runs a cell of %%torchrun; what it printed."""

    def execute(options, code):
        outcome = shell.run_cell(f"%%torchrun {options}\n{textwrap.dedent(code).lstrip()}")
        if outcome.error_in_exec:
            raise outcome.error_in_exec
        assert outcome.success
        return capsys.readouterr().out

    return execute


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(run.process, "start_torchrun", lambda *arguments: pytest.fail("a run was started"))


def test_a_plain_script_runs_on_every_rank_and_its_last_value_is_shown_once(cell):
    assert cell("-n 3", GATHER + "x") == "ranks 0–2: tensor([6., 6.])\n"


def test_values_and_output_that_differ_are_shown_by_rank(cell):
    code = """
        import os
        print("hello")
        if os.environ["RANK"] == "1":
            print("and again")
        {"rank": int(os.environ["RANK"]), "half": int(os.environ["RANK"]) // 2}
    """
    assert cell("-n 3", code).splitlines() == [
        "[ranks 0, 2] hello",
        "[rank 1] hello",
        "[rank 1] and again",
        "rank 0: {'rank': 0, 'half': 0}",
        "rank 1: {'rank': 1, 'half': 0}",
        "rank 2: {'rank': 2, 'half': 1}",
    ]


@pytest.mark.parametrize("last", ["x;", "x = 1", "None"])
def test_no_value_is_shown_where_an_ordinary_cell_shows_none(cell, last):
    assert cell("", f"x = 2\n{last}") == ""


def test_the_cell_is_a_main_module_with_classes_and_functions(cell):
    code = """
        import pickle
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        def double(point):
            return Point(2 * point.x)
        (__name__, double(pickle.loads(pickle.dumps(Point(2)))))
    """
    assert cell("", code) == "ranks 0–1: ('__main__', Point(x=4))\n"


def test_names_of_the_notebook_reach_the_ranks_when_they_are_listed_and_modules_anyway(cell, shell):
    shell.run_cell("import math as m\nbatch = [1, 2]\ndef twice(x):\n    return [*x, *x] if m else x")
    assert cell("--use batch,twice", "twice(batch) + [m.pi > 3]") == "ranks 0–1: [1, 2, 1, 2, True]\n"
    with pytest.raises(labkit.RankFailed) as caught:
        cell("", "len(batch)")
    assert re.search(words("batch … notebook … --use batch"), str(caught.value))


def test_a_plain_script_waits_for_emulated_links(cell, shell):
    shell.run_cell("import labkit\nslow = labkit.Emulated(latency_us=100_000)")
    code = """
        import time
        dist.init_process_group("gloo")
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(torch.ones(1))
        int(10 * (time.monotonic() - begun)) / 10
    """
    assert cell("--emulate slow --name waited", code) == "ranks 0–1: 0.2\n"
    assert shell.user_ns["waited"].stamp.startswith("emulated: 100000 µs")


def test_a_group_without_a_backend_carries_cpu_tensors_where_torch_would_take_nccl(cell):
    """As on a machine with a GPU, whose default is NCCL alone; seen on an H100."""
    code = """
        torch._C._get_accelerator = lambda: torch.device("cuda")
        dist.init_process_group()
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.barrier()
        x
    """
    assert cell("", code) == "ranks 0–1: tensor([2.])\n"
    mesh = """
        torch._C._get_accelerator = lambda: torch.device("cuda")
        from torch.distributed.tensor import init_device_mesh
        init_device_mesh("cpu", (2,))
        x = torch.ones(1)
        dist.all_reduce(x)
        x
    """
    assert cell("", mesh) == "ranks 0–1: tensor([2.])\n"


def test_a_backend_that_a_cell_names_is_taken_and_only_a_missing_one_filled_in(cell):
    code = """
        from labkit.session.cell import set_default_backend
        set_default_backend("cpu:gloo")
        dist.init_process_group(NAMED)
        dist.get_backend_config()
    """
    assert cell("-n 1", code.replace("NAMED", "")) == "rank 0: 'cpu:gloo'\n"
    named = code.replace("NAMED", "backend='cpu:gloo,cuda:gloo'")
    assert cell("-n 1", named) == "rank 0: 'cpu:gloo,cuda:gloo'\n"


def test_each_rank_of_a_cell_has_compiled_code_of_its_own(cell):
    assert cell("-n 2", "torch.compiler.config.cache_key_tag") == "rank 0: ' rank 0'\nrank 1: ' rank 1'\n"


def test_the_result_is_bound_and_values_come_home(cell, shell):
    code = """
        from labkit import rank
        from torch.distributed.tensor import DTensor
        with rank.session() as here:
            rank.report(mine=torch.ones(2) * here.rank, sizes=(1, 2))
            rank.report(more={"a": None})
    """
    cell("-n 2 --name halo", code)
    result = shell.user_ns["halo"]
    assert isinstance(result, labkit.RunResult) and result.info["program"] == "cell"
    first, second = (rank.reported for rank in result.ranks)
    assert first.keys() == {"mine", "sizes", "more"}
    assert torch.equal(second["mine"], torch.ones(2)) and second["sizes"] == [1, 2] and second["more"] == {"a": None}


def test_what_cannot_be_sent_home_is_refused(cell):
    with pytest.raises(labkit.RankFailed, match=words("(x=...) … function")):
        cell("", "from labkit import rank\nrank.give(x=lambda: 1)")


FAILING = """\
print("before")
dist.init_process_group()
if dist.get_rank() == 2:
    raise ValueError("widths differ")
dist.barrier()"""


def test_an_error_says_which_rank_and_marks_the_line(cell, capsys):
    with pytest.raises(labkit.RankFailed) as caught:
        cell("-n 3", FAILING)
    assert caught.value.rank == 2
    lines = str(caught.value).splitlines()
    assert lines[:5] == [
        "rank 2 failed: ValueError: widths differ",
        "      3 | dist.init_process_group()",
        "      4 | if dist.get_rank() == 2:",
        '-->   5 |     raise ValueError("widths differ")',
        "      6 | dist.barrier()",
    ]
    assert lines[5].startswith("its output: ") and caught.value._render_traceback_() == lines
    shown = capsys.readouterr().out
    # Gloo may complain on ranks 0 and 1 between their lines, when it connects them after rank 2 has left.
    first_line, *_ = shown.splitlines()
    assert re.fullmatch(r"\[ranks? [0-2, –]+\] before", first_line)
    assert "Traceback" not in shown.partition("rank 2 failed")[0]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("-n 3 --fails", FAILING, "rank 2 failed: ValueError: widths differ"),
        ("-n 2 --timeout 4 --fails", GATHER + "while True:\n    pass", "no end after 4 s"),
    ],
)
def test_a_cell_that_is_meant_to_fail_says_how_and_raises_nothing(shell, capsys, options, code, said):
    outcome = shell.run_cell(f"%%torchrun {options} --name broken\n{code}")
    assert outcome.success
    shown = capsys.readouterr().err
    assert shown.startswith(said) and "-->" in shown
    assert isinstance(shell.user_ns["broken"], labkit.RankFailed if "failed" in said else labkit.RunTimedOut)
    assert ".log" not in shown, "a folder of one machine is no lesson"


def test_a_deadlock_shows_every_ranks_line(cell):
    code = GATHER + "if dist.get_rank() == 0:\n    dist.all_reduce(x)\nelse:\n    import time\n    time.sleep(60)"
    with pytest.raises(labkit.RunTimedOut) as caught:
        cell("-n 3 --timeout 4", code)
    text = str(caught.value)
    assert "no end after 4 s" in text
    first, others = text.split("ranks 1–2:")
    assert "rank 0:" in first and "-->   7 |     dist.all_reduce(x)" in first
    assert "not done: gloo:all_reduce of float[2]" in first and "not done" not in others
    assert "-->  10 |     time.sleep(60)" in others


def test_a_stopped_cell_shows_every_ranks_line_and_no_frame_of_labkit(shell, tmp_path, capsys):
    class StopOnce(Display):
        """Interrupts, as Stop does, once both ranks are about to sleep."""

        def show(self, state, lines):
            if len(asleep := list(tmp_path.glob("asleep_*"))) == 2:
                asleep[0].unlink()
                raise KeyboardInterrupt

    code = GATHER + f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, f'asleep_{{dist.get_rank()}}').touch()\n"
    with use_display(StopOnce()):
        stopped = shell.run_cell(f"%%torchrun --timeout 30\n{code}time.sleep(60)").error_in_exec
    assert isinstance(stopped, KeyboardInterrupt)
    first, who, *lines = str(stopped).splitlines()
    assert (first, who) == ("stopped, and no rank is left. Where each rank was:", "ranks 0–1:")
    assert lines[-1] == "-->   9 | time.sleep(60)"
    shown = capsys.readouterr()
    assert "-->   9 | time.sleep(60)" in shown.out + shown.err and "run.py" not in shown.out + shown.err


def test_modules_beside_the_notebook_are_found_and_labkits_own_are_not(cell, shell, tmp_path, monkeypatch):
    (tmp_path / "other_module.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "meter.py").write_text("NAME = 'mine'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert cell("", "import other_module, meter\n(other_module.double(3), meter.NAME)") == "ranks 0–1: (6, 'mine')\n"


def test_output_of_a_failed_cell_in_any_encoding_and_with_tracebacks_of_its_own(cell, capsys):
    code = """
        import sys, traceback
        sys.stdout.buffer.write(b"\\xff\\n")
        sys.stdout.flush()
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc(file=sys.stdout)
        print("after that")
        raise ValueError("the real one")
    """
    with pytest.raises(labkit.RankFailed, match="the real one"):
        cell("", code)
    shown, verdict, reported = re.split(r"rank ([01]) failed", capsys.readouterr().out, maxsplit=1)
    assert verdict in ("0", "1") and "the real one" in reported, "either rank can be the first"
    assert "[ranks 0–1] \ufffd\n" in shown and "[ranks 0–1] after that\n" in shown
    assert shown.count("Traceback") == 1 and "the real one" not in shown


def test_a_timeout_shows_the_line_of_the_main_thread(cell):
    code = """
        import threading, time
        threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
        time.sleep(100)
    """
    with pytest.raises(labkit.RunTimedOut) as caught:
        cell("--timeout 3", code)
    assert "-->   4 | time.sleep(100)" in str(caught.value)


@pytest.mark.parametrize(("last", "shown"), [("x;  # quiet", ""), ("x  # see a;", "ranks 0–1: 2\n")])
def test_a_semicolon_counts_and_one_in_a_comment_does_not(cell, last, shown):
    assert cell("", f"x = 2\n{last}") == shown


def test_a_cell_may_change_its_environment_and_hold_any_line_end(cell):
    assert cell("", "import os\nos.environ.clear()\n5") == "ranks 0–1: 5\n"
    with pytest.raises(labkit.RankFailed, match=r"-->   3 \| 1 / 0"):
        cell("", 's = "a\u2028b\x0cc"\n1 / 0')


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("code", ["return 1", "await something()", "break"])
def test_nothing_starts_with_what_cannot_be_compiled(cell, code):
    with pytest.raises(labkit.ParameterError, match=words("SyntaxError: … Nothing was started")):
        cell("", code)


@pytest.mark.usefixtures("nothing_starts")
def test_nothing_starts_with_a_syntax_error(cell, shell):
    outcome = shell.run_cell("%%torchrun\nx = 1\nfor in range(3)")
    assert isinstance(outcome.error_in_exec, labkit.ParameterError)
    assert "-->   3 | for in range(3)\nSyntaxError: invalid syntax. Nothing was started." in str(outcome.error_in_exec)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("-n 0", labkit.ParameterError, "nproc = 0"),
        ("--timeout -1", labkit.ParameterError, "timeout_s = -1"),
        ("--device tpu", labkit.ParameterError, "'tpu' … cpu"),
        ("--use nobody", UsageError, "--use nobody … name"),
        ("--name 3x", UsageError, "--name 3x"),
        ("--name class", UsageError, "--name class"),
        ("--nodes 3", UsageError, "--nodes 3"),
        ("--emulate h1000", labkit.ParameterError, "'h1000' … h100-8x"),
        ("--emulate In", labkit.ParameterError, "emulate = … labkit.Emulated"),
    ],
)
def test_wrong_options_are_refused_before_a_start(cell, options, error, message):
    with pytest.raises(error, match=words(message)):
        cell(options, "1")


@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_leave_the_notebook_is_named(cell, shell):
    shell.run_cell("import threading\nlock = threading.Lock()")
    with pytest.raises(labkit.ParameterError, match=words("lock … ranks")):
        cell("--use lock", "lock")


@pytest.mark.parametrize(("ranks", "words"), [([2], "rank 2"), ([0, 1, 2], "ranks 0–2"), ([0, 2, 3], "ranks 0, 2–3")])
def test_ranks_in_words(ranks, words):
    assert magic.rank_list_text(ranks) == words
