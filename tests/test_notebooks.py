"""Every lab's notebooks: up to date, run from top to bottom, and say again what they said when they were made."""

import ast
import contextlib
import copy
import dataclasses
import importlib
import inspect
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args

import nbformat
import papermill
import psutil
import pytest
from fixture_long import half_of_today, long_but
from fixture_notebooks import read_points, read_small_values, unused

import labkit
from labkit import doctor
from labkit.environment import ENV_STRICT_CLAIMS, ENV_VERDICTS
from notebooks.tools.build import FOLDER, MAX_BYTES, stale
from notebooks.tools.run import summary
from notebooks.tools.source import BEGIN, find_labs, learner_notebook, solved_notebook

LABS = find_labs(FOLDER)
PROGRAMS = {path.stem for path in (FOLDER.parent / "launch").glob("[a-z]*.py")}
NBVAL_OPTIONS = [
    *("--nbval", "--nbval-current-env", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=120"),
    # nothing of this project's own pytest settings
    *("-p", "no:cacheprovider", "-p", "no:timeout", "-c", "/dev/null", "-q", "--rootdir"),
]
DAILY = "03b_extensions_at_work"
"""The lab whose solved notebook every ``make test`` runs; all run within a week of ``make test TODAY=1``."""
ELSEWHERE = {"00_ranks", "01_spatial_sharding"}
"""Labs whose learner's notebook runs with small values in tests/test_wheel.py and tests/browser/test_labs.py."""
OF_TERMINALS = {"08_beyond_one_machine": {"DIM"}}
"""Parameters that ``torchrun`` in a terminal gets, and no run of labkit's."""
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)


def test_there_are_labs():
    assert LABS, f"no source in {FOLDER / 'src'}"


@each_lab
def test_notebooks_are_what_the_source_gives(lab):
    assert stale(lab) == []


@each_lab
def test_sizes(lab):
    for path in (lab.learner, lab.solved):
        assert path.stat().st_size < MAX_BYTES, f"{path.name}: draw its figures at a lower dpi"


@each_lab
def test_both_notebooks_name_a_kernel_one_cell_of_parameters_and_one_with_the_summary(lab):
    for path in (lab.learner, lab.solved):
        notebook = nbformat.read(path, as_version=4)
        assert (notebook.metadata.kernelspec.name, notebook.metadata.kernelspec.language) == ("python3", "python")
        tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        assert len(tagged) == 1, path
        assert sum("summary" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1, path
        for line in tagged[0].source.splitlines():
            assert not line or line.startswith("#") or (": " in line.split("=")[0] and "#" in line), (
                f"a parameter has a type and a comment: {line}"
            )


@each_lab
def test_there_are_at_least_four_exercises_and_their_answers_are_gone(lab):
    assert lab.source.read_text().count(BEGIN) >= 4
    assert "SOLUTION" not in lab.learner.read_text()
    assert any(cell.get("outputs") for cell in nbformat.read(lab.solved, as_version=4).cells)


@each_lab
def test_learner_notebook_is_stored_without_outputs(lab):
    assert not any(cell.get("outputs") for cell in nbformat.read(lab.learner, as_version=4).cells)


def lab_of(name):
    (lab,) = (lab for lab in LABS if lab.name == name)
    return lab


@each_lab
def test_a_lab_has_small_values_for_some_of_its_parameters(lab):
    assert read_small_values(lab.name).keys() <= set(parameters_of(lab)), 'write # %% tags=["parameters"] small={…}'


def parameters_of(lab):
    notebook = nbformat.read(lab.learner, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return re.findall(r"^(\w+):", cell.source, flags=re.MULTILINE)


@each_lab
def test_what_a_lab_calls_of_labkit_is_there_and_takes_these_arguments(lab):
    calls = list(calls_of_labkit(lab))
    assert len(calls) > 10
    for call, function in calls:
        if not any(isinstance(each, ast.Starred) for each in call.args):
            named = dict.fromkeys(each.arg for each in call.keywords if each.arg)
            bound = inspect.signature(function).bind_partial(*call.args, **named)
            if accepted := accepted_by_program(call):
                assert bound.arguments.get("params", {}).keys() <= accepted, ast.unparse(call)


def calls_of_labkit(lab):
    """Each call of what the notebook has imported of labkit, and what it calls."""
    known = {}
    for cell in code_cells(lab.solved):
        nodes = list(ast.walk(ast.parse(without_magics(cell.source))))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and "labkit" in ast.unparse(node):
                exec(ast.unparse(node), known)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.pop(node.id, None)  # from here on it is something of the notebook's own
        for node in nodes:
            if isinstance(node, ast.Call) and (called := looked_up(node.func, known)) and not inspect.isbuiltin(called):
                yield node, called


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def without_magics(text):
    """A cell as Python: what is below ``%%torchrun`` runs on ranks, and is Python, too."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in text.splitlines())


def looked_up(node, known):
    """What an expression such as ``plots.fsdp.ladder`` stands for; None where its first name is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (of := looked_up(node.value, known)):
        return getattr(of, node.attr)
    return None


def accepted_by_program(call):
    """The parameters of the program in launch/ that a call names first, as ``labkit.run("fsdp_wrap")`` does."""
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if first not in PROGRAMS:
        return set()
    return {field.name for field in dataclasses.fields(importlib.import_module(f"launch.{first}").Config)}


@pytest.mark.long  # what they run, the solved notebooks run, too; an empty answer is judged in test_exercises.py
@pytest.mark.notebook
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.name not in ELSEWHERE], ids=lambda lab: lab.name)
def test_unsolved_notebook_runs_from_top_to_bottom_in_any_folder_with_small_values(lab, tmp_path, monkeypatch):
    values = read_small_values(lab.name)
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    nbformat.write(with_second_round(lab.learner, lab in half_of_today(LABS)), tmp_path / "twice.ipynb")
    papermill.execute_notebook(
        *(tmp_path / "twice.ipynb", tmp_path / "done.ipynb", values),
        **{"cwd": tmp_path, "progress_bar": False, "execution_timeout": 120},
    )
    shown = summary(nbformat.read(tmp_path / "done.ipynb", as_version=4))
    assert shown and "differs" not in "".join(shown), shown
    assert set(unused(values, tmp_path / "runs")) <= OF_TERMINALS.get(lab.name, set())
    assert still_alive(tmp_path / "runs") == [], "processes that the notebook has left"


STARTS_RANKS = ("labkit.run(", "labkit.check(", "labkit.compare(", "labkit.simulate(", "labkit.plan(", "labkit.submit(")


def with_second_round(path, again):
    """A notebook of which all cells run, then those of exercises, then, if asked for, all again but the parameters."""
    notebook = nbformat.read(path, as_version=4)
    exercises = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    others = [cell for cell in notebook.cells if again and "parameters" not in cell.metadata.get("tags", [])]
    for cell in map(copy.deepcopy, [*exercises, *others]):
        cell.id = f"{cell.id[:40]}-{len(notebook.cells)}"
        notebook.cells.append(cell)
    return notebook


@each_lab
def test_code_in_the_text_can_be_copied(lab):
    text = "\n\n".join(cell.source for cell in learner_notebook(lab.source).cells if cell.cell_type == "markdown")
    for language, code in re.findall(r"^```(python|diff)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "diff":
            assert all(line[:2] in ("", "+ ", "- ", "  ") for line in code.splitlines()), code
            code = "\n".join(line[2:] for line in code.splitlines() if line[:1] == "+")
        ast.parse(code)


@each_lab
def test_no_cell_gives_another_meaning_to_an_imported_name(lab):
    imported, bound = set(), set()
    for cell in code_cells(lab.solved):
        if not cell.source.startswith("%%torchrun"):
            tree = ast.parse(without_magics(cell.source))
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            imported |= {(each.asname or each.name).partition(".")[0] for node in imports for each in node.names}
            bound |= {name for node in tree.body for name in names_bound_by(node)}
    assert not imported & bound


@pytest.mark.parametrize("lab", [lab for lab in LABS if lab.name < "06"], ids=lambda lab: lab.name)
def test_each_commit_has_a_name_of_its_own_so_that_a_cell_below_may_run_again(lab):
    commits = [cell for cell in code_cells(lab.learner) if "commit" in cell.metadata.get("tags", [])]
    names = [name for cell in commits for node in ast.parse(cell.source).body for name in names_bound_by(node)]
    assert len(commits) == len({name for name in names if name.startswith("mine")}) > 0


@each_lab
def test_a_run_that_a_cell_has_named_is_named_so_in_all_cells(lab):
    runs, other = set(), set()
    for cell in code_cells(lab.solved):
        if not cell.source.startswith("%%torchrun"):
            for node in ast.parse(without_magics(cell.source)).body:
                started = isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(STARTS_RANKS)
                (runs if started else other).update(names_bound_by(node))
    assert not runs & other, "cells below, run once more, would find something else there"


def names_bound_by(node):
    """What a statement of a cell itself assigns or defines; the names inside of functions are their own."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def still_alive(runs):
    """Processes with this folder for runs in their environment, once they have had time to end: kernel, ranks, all."""
    give_up = time.monotonic() + 10
    while alive := [each for each in psutil.process_iter() if environment_of(each).get("LABKIT_RUNS") == str(runs)]:
        if time.monotonic() > give_up:
            return alive
        time.sleep(0.1)
    return []


def environment_of(process):
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    return {}


def setup_of(lab):
    """The learner's first cells of code: imports, parameters, and what holds these to their ranges."""
    cells = [cell for cell in learner_notebook(lab.source).cells if cell.cell_type == "code"]
    install, imports, parameters, first_use = (cell.source for cell in cells[:4])
    assert "find_spec" in install and "parameters" in cells[2].metadata.tags
    lines = ast.parse(first_use).body
    last = max(index for index, line in enumerate(lines) if "require(" in ast.unparse(line))
    # What follows, runs among it, is executed with all points where the notebooks are.
    return imports, parameters, ast.unparse(ast.Module(lines[: last + 1], []))


@each_lab
def test_each_parameter_is_held_to_its_range_by_the_first_cell_that_uses_it(lab, monkeypatch):
    monkeypatch.setattr(doctor, "show", lambda **_: None)
    imports, parameters, first_use = setup_of(lab)
    kernel, rules = {}, []
    exec(f"{imports}\n{parameters}", kernel)
    noted = {"require": lambda name, value, kind=int, **rule: rules.append((name, value, kind, rule))}
    exec(first_use, kernel | noted)
    assert {name for name, *_ in rules} == set(parameters_of(lab))
    exec(first_use, dict(kernel))
    for name, value, kind, rule in rules:
        assert value == kernel[name]
        for bad in values_outside(value, kind, rule):
            with pytest.raises(labkit.ParameterError) as refused:
                exec(first_use, kernel | {name: bad})
            rule_text = "one of " if get_args(kind) else kind.__name__
            assert str(refused.value).startswith(f"{name} = {bad!r}, but must be {rule_text}")
        assert rule["because"] in str(refused.value), "the last value keeps all rules but this one"


@each_lab
def test_the_points_vary_each_parameter_and_have_both_bounds_of_the_ranks(lab, monkeypatch):
    monkeypatch.setattr(doctor, "show", lambda **_: None)
    imports, _, first_use = setup_of(lab)
    kernel, bounds = {}, []
    exec(imports, kernel)
    noted = {
        "require": lambda name, value, *kind, **rule: bounds.append(bounds_of(rule, *kind)) if name == "RANKS" else None
    }
    points = read_points(lab.name)
    for point in points:
        assert point.keys() == set(parameters_of(lab))
        exec(first_use, kernel | point)
        exec(first_use, kernel | point | noted)
    assert len(points) >= 3, 'write # %% tags=["parameters"] points=[[…], […], […]]'
    assert all(len(set(values)) > 1 for values in zip(*map(dict.values, points), strict=True))
    if bounds:
        ranks = [point["RANKS"] for point in points]
        assert min(ranks) == max(least for least, _ in bounds)
        assert max(ranks) == min(most for _, most in bounds)


def bounds_of(rule, kind=int):
    """The least and the largest value that a rule of ``require`` accepts."""
    choices = get_args(kind) or (rule.get("at_least", 0), rule.get("at_most", math.inf))
    return min(choices), max(choices)


def values_outside(value, kind, rule):
    """Values that break a rule of ``require``: one for each limit, the last of which may be broken by this
    rule alone.
    """
    yield "four"
    if get_args(kind):
        yield max(get_args(kind)) + 1
    if "above" in rule:
        yield kind(rule["above"])
    if "at_least" in rule:
        yield rule["at_least"] - 1
    if "at_most" in rule:
        yield rule["at_most"] + 1
    if "multiple_of" in rule:
        yield value + rule["multiple_of"] // 2


def points_to_try():
    """All points of all labs, or the first one of each lab of half of them, of which a seventh runs."""
    points = slice(None if os.environ.get("LABKIT_TEST") == "all" else 1)
    return [(lab, each) for lab in half_of_today(LABS) for each in read_points(lab.name)[points]]


@pytest.mark.long
@pytest.mark.notebook
@pytest.mark.calm
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("lab", "values"),
    points_to_try(),
    ids=lambda each: each.name if hasattr(each, "name") else "-".join(f"{value}" for value in each.values()),
)
def test_solved_notebook_runs_to_its_end_with_other_parameters(lab, values, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv(ENV_VERDICTS, str(tmp_path / "verdicts.json"))
    monkeypatch.delenv(ENV_STRICT_CLAIMS, raising=False)  # so that all claims are seen, and not the first
    if wrong := contradicted_claims(lab, values, tmp_path):
        wrong &= contradicted_claims(lab, values, tmp_path)  # a time may be disturbed once
    assert not wrong
    assert set(unused(values, tmp_path / "runs")) <= OF_TERMINALS.get(lab.name, set())


def contradicted_claims(lab, values, folder):
    """The claims that are not so where the solved notebook runs with these values; all its exercises must pass."""
    source, done = folder / "source.ipynb", folder / "done.ipynb"
    nbformat.write(solved_notebook(lab.source), source)
    papermill.execute_notebook(source, done, values, cwd=folder, progress_bar=False, execution_timeout=300)
    (so_far,) = (cell for cell in code_cells(done) if "so_far(" in cell.source)
    passed, of = re.match(r"(\d+) of (\d+) passed", so_far.outputs[0].data["text/plain"]).groups()
    assert passed == of
    printed = "".join(output.get("text", "") for cell in code_cells(done) for output in cell.outputs)
    return set(re.findall("^Not so in this run.*", printed, flags=re.MULTILINE))


@pytest.mark.notebook
def test_papermill_shows_the_refusal_and_nothing_was_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    with pytest.raises(
        papermill.PapermillExecutionError, match="ParameterError: RANKS = 1, but must be int ≥ 2 and ≤ 8: one rank"
    ):
        papermill.execute_notebook(
            lab_of("02_fsdp_wrapping").learner, tmp_path / "done.ipynb", {"RANKS": 1}, progress_bar=False
        )
    assert not any((tmp_path / "runs").iterdir())  # the folder itself is made by the doctor


@pytest.mark.parametrize("lab", long_but([lab for lab in LABS if lab.name == DAILY], LABS), ids=lambda lab: lab.name)
@pytest.mark.notebook
@pytest.mark.calm
@pytest.mark.timeout(1900)
def test_solved_notebook_gives_its_outputs_again(lab, tmp_path):
    command = [sys.executable, "-m", "pytest", *NBVAL_OPTIONS, str(Path(lab.solved).parent), str(lab.solved)]
    strict = os.environ | {ENV_STRICT_CLAIMS: "1"}
    run = partial(subprocess.run, command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=strict)
    answer = run()
    # A time may be disturbed once, and a rank of another test take the port that was free for the kernel.
    if any(said in answer.stdout for said in ("the claim does not hold", "Kernel didn't respond")):
        print(answer.stdout[-8000:])
        answer = run()
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
    assert "passed" in answer.stdout
