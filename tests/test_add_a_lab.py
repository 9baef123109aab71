"""A lab is added to a copy of this checkout by writing the files that CONTRIBUTING.md names, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
COPIED = (
    "README.md",
    "labkit",
    "labkit_course",
    "labkit_simulate",
    "labkit_cluster",
    "launch",
    "notebooks",
    "tests",
    "pyproject.toml",
)
FILES = {
    "notebooks/src/90_echo.py": '''
        # %% [markdown]
        # # Echo

        # %%
        import torch
        import torch.distributed as dist

        from labkit import doctor, plots
        from labkit_course.checks import echo as checks
        from labkit.config import require
        from labkit_course.verdict_store import so_far

        # %% tags=["parameters"] small={"SIZE": 4} points=[[2],[5],[64]]
        SIZE: int = 8  # elements of the vector

        # %%
        require("SIZE", SIZE, at_least=2, because="one element has no order")

        # %% [markdown]
        # ### Exercise 1: a sum (•, 5 minutes)

        # %%
        def total(mine: torch.Tensor) -> torch.Tensor:
            """Sum the vectors of all ranks."""
            ### BEGIN SOLUTION
            dist.all_reduce(mine)
            return mine
            ### END SOLUTION

        # %%
        checks.total(total)

        # %%
        so_far("echo")
    ''',
    "labkit/theory/echo.py": '''
        """Formulas of the lab echo."""


        def sum_of_ranks(ranks: int) -> int:
            """Sum the numbers of the ranks."""
            return ranks * (ranks - 1) // 2
    ''',
    "labkit/parallel/echo.py": '''
        """Sum a vector over all ranks."""

        import torch.distributed as dist
        from torch import Tensor


        def apply_echo(vector: Tensor) -> Tensor:
            """Sum a vector over all ranks, in place."""
            dist.all_reduce(vector)
            return vector
    ''',
    "labkit/parity/echo.py": '''
        """Hold the sum of all ranks against one device's."""

        from torch import Tensor

        from labkit.theory.echo import sum_of_ranks


        def count_wrong(vector: Tensor, ranks: int) -> int:
            """Count the elements that are not the sum."""
            return int((vector != sum_of_ranks(ranks)).sum())
    ''',
    "labkit/plots/echo.py": '''
        """Figures of the lab echo."""

        from matplotlib.axes import Axes

        from labkit.plots import style


        def echo_bars(heights: list[float], *, ax: Axes | None = None) -> Axes:
            """Draw a bar for each height."""
            ax = style.make_axes(ax)
            ax.bar(range(len(heights)), heights)
            return ax
    ''',
    "labkit_course/widgets/echo.py": '''
        """The explorer of the lab echo."""

        from labkit_course.widgets.explorer import Explorer


        class EchoExplorer(Explorer):
            """Has no control."""
    ''',
    "labkit_course/checks/echo.py": '''
        """Checks of the lab echo."""

        from labkit_course.checks.judge import Verdict, WrongAnswer, exercise, passing_verdict
        from labkit_course.checks.on_ranks import judge_on_ranks
        from labkit.theory.echo import sum_of_ranks


        @exercise
        def total(answer) -> Verdict:
            """Exercise 1: the sum over real ranks."""

            def judge_rank(ranks, index, sent):
                first = float(sent["got"][0])
                if first != sum_of_ranks(ranks):
                    raise WrongAnswer(f"rank {index} returned {first:g}")

            judge_on_ranks("echo", answer, judge=judge_rank, sizes=(2, 3), timeout_s=60, \
waiting="do all ranks call it?", size=3)
            return passing_verdict("2 and 3 ranks agree")
    ''',
    "labkit_course/checks/ranks/echo.py": '''
        """Give each rank a vector of its own number."""

        import torch
        import torch.distributed as dist


        def run_answer(answer, size):
            """Call the answer, and return what it returned."""
            return {"got": answer(torch.full((size,), float(dist.get_rank())))}
    ''',
    "launch/echo_sum.py": '''
        """Sum the numbers of all ranks."""

        from dataclasses import dataclass
        from typing import Literal

        import torch

        from labkit import rank
        from labkit.config import PositiveInt
        from labkit.parallel.echo import apply_echo
        from labkit.parity import echo as parity


        @dataclass
        class Config:
            """How many elements."""

            size: PositiveInt = 8
            """Elements of the vector."""
            check: Literal["none", "parity"] = "none"
            """parity: hold the sum against one device's."""


        def main(config: Config) -> None:
            """Sum."""
            with rank.session() as here:
                vector = apply_echo(torch.full((config.size,), float(here.rank), device=here.device))
                if config.check == "parity":
                    wrong = parity.count_wrong(vector, here.world_size)
                    return here.finish_check(check="parity", compared=len(vector), ok=wrong == 0)
                for step in here.steps(1):
                    step.record_scalar("first", vector[0])


        if __name__ == "__main__":
            rank.run_main(main, Config)
    ''',
    "tests/answers/echo.py": '''
        """Wrong answers of the lab echo."""

        from answers import Exercise
        from labkit_course.checks import echo as checks

        EXERCISES = [
            Exercise(
                "90.1",
                "total",
                checks.total,
                {
                    "rank 0 returned 0": "return mine",
                    "rank 0 returned 2": "dist.all_reduce(mine); return 2 * mine",
                    "rank 0 returned 5": "return 0 * mine + 5",
                },
            )
        ]
    ''',
    "tests/test_echo.py": '''
        """The formula of the lab echo."""

        from labkit.theory.echo import sum_of_ranks


        def test_three_ranks_sum_to_three():
            assert sum_of_ranks(3) == 3
    ''',
}
USE = """
import torch.distributed as dist
import labkit
from labkit import plots
from labkit_course import widgets
from labkit_course.checks import echo
from labkit_course import lab_catalog
from labkit.launcher import fork_server

(lab,) = [each for each in lab_catalog.all_labs() if each.key == "echo"]
assert [(each.number, each.name) for each in lab.exercises] == [("90.1", "total")]
assert plots.echo_bars([1.0]).patches and widgets.EchoExplorer.__module__ == "labkit_course.widgets.echo"
names = fork_server.list_program_modules()
assert "labkit.parallel.echo" in names and "labkit.parity.echo" in names, names
result = labkit.run("echo_sum", nproc=2, device="cpu", size=4)
assert result.value("first") == 1
result = labkit.run("echo_sum", nproc=2, device="cpu", check="parity")
assert result.value("compared") == 8

def total(mine):
    dist.all_reduce(mine)
    return mine

assert echo.total(total).state == "passed", echo.total(total)
assert echo.total(lambda mine: mine).detail == "rank 0 returned 0"
"""
LINT = 'from importlinter.cli import lint_imports_command as lint; lint(["--no-cache"])'
CONTRACT = "What runs and measures knows no lab"
LAYERS = "Folders are layers: nothing imports upward"


@pytest.fixture(scope="module")
def checkout(repository, tmp_path_factory):
    """A copy of this checkout with the lab's files; a file that is there already is an error."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "solved", "browser", "cluster", "data", "[0-9]*.ipynb")
    for name in COPIED:
        copy = shutil.copytree if (repository / name).is_dir() else shutil.copy
        copy(repository / name, folder / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    for name, text in FILES.items():
        with open(folder / name, "x") as file:
            file.write(textwrap.dedent(text).lstrip())
    return folder


def run_python(checkout, *arguments):
    """Run the copy's code in a new Python; returns what it printed."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "LABKIT_RUNS": str(checkout / "runs"),
        "LABKIT_TEST": "all",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=150)
    return done.returncode, done.stdout + done.stderr


def test_contributing_names_the_files_of_a_lab(repository):
    section = (repository / "CONTRIBUTING.md").read_text().split("## A new lab\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    words = {"NN_topic": "90_echo", "<lab>": "echo", "<program>": "echo_sum"}
    assert [re.sub("NN_topic|<lab>|<program>", lambda word: words[word[0]], name) for name in names] == list(FILES)


@pytest.fixture(scope="module")
def built(checkout):
    """The copy, with the lab's notebooks."""
    status, said = run_python(checkout, "-m", "notebooks.tools.build", "90_echo", "--learner")
    assert status == 0, said
    return checkout


def test_the_lab_is_built_and_its_program_and_its_check_run_on_real_ranks(built):
    status, said = run_python(built, "-c", USE)
    assert status == 0, said


def test_the_tests_of_all_labs_take_the_lab_in(built):
    modules = ["tests/test_exercises.py", "tests/test_notebooks.py", "tests/test_echo.py"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *modules, "-k"]
    status, said = run_python(
        built, *command, "90.1 or (90_echo and (range or values or points) and not unsolved) or three_ranks"
    )
    assert status == 0, said
    assert re.search(r"^8 passed", said, flags=re.MULTILINE), said


def test_the_import_contracts_hold_the_lab_without_a_word_about_it(checkout):
    _, said = run_python(checkout, "-c", LINT)
    assert f"{CONTRACT} KEPT" in said and f"{LAYERS} KEPT" in said, said
    intruder = checkout / "labkit" / "launcher" / "intruder.py"
    intruder.write_text("from labkit.theory.echo import sum_of_ranks\n")
    status, said = run_python(checkout, "-c", LINT)
    intruder.unlink()
    assert status and f"{CONTRACT} BROKEN" in said, said
    assert "labkit.launcher.intruder -> labkit.theory.echo" in said, said
