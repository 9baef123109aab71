"""``%%torchrun``: run a cell's code on real ranks.

    %%torchrun -n 4
    dist.init_process_group()
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x)
    x

Every rank runs the cell as a script of its own, in a new process: plain PyTorch is enough. The
ranks' output appears while they run, and at the end once more, sorted by rank; so does the value of
the last line.
"""

import ast
import itertools
import keyword
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.errors import LabError, ParameterError, RankFailed, RunTimedOut
from labkit.launcher.run import run_with_payload
from labkit.runs.folder import RunFolder, read_json
from labkit.runs.result import RunResult
from labkit.session.pending_calls import PENDING_WORDS

PROGRAM = Path(__file__).resolve().parents[1] / "session" / "cell.py"
# The same values as in session/cell.py, which would import torch.
CELL_NAME, VALUE_ARTIFACT = "<cell>", "value"
CELL_FRAME_PATTERN = re.compile(rf'File "{CELL_NAME}", line (\d+)')
TRACEBACK_HEADER = "Traceback (most recent call last):"
CONTEXT_LINES = 2
AnyError = TypeVar("AnyError", bound=BaseException)


@magics_class
class TorchrunMagics(Magics):
    """Holds the cell magic."""

    @magic_arguments()
    @argument("-n", "--nproc", type=int, default=2, help="number of ranks; 2 by default")
    @argument("--timeout", type=float, default=60, help="limit in seconds; 60 by default")
    @argument("--name", default="", help="the notebook's name for the RunResult, or the failure")
    @argument("--device", help="auto, cpu or cuda; by default what LABKIT_DEVICE says")
    @argument("--emulate", default="", help="hardware: a notebook's name for it, or h100-8x")
    @argument("--fails", action="store_true", help="the cell is meant to fail: show how, go on")
    @argument("--use", default="", help="names of the notebook, with commas; modules come anyway")
    @cell_magic
    def torchrun(self, line: str, cell: str) -> None:
        """Run this cell on real ranks, each a new process that torchrun starts."""
        options = parse_argstring(self.torchrun, line)
        name = options.name
        if name and (not name.isidentifier() or keyword.iskeyword(name)):
            raise UsageError(f"--name {name} is no name for a value: use letters, digits and _")
        # The first line of the cell is the magic's; this keeps the line numbers right.
        text = "\n" + cell
        tree = parse_cell(text)
        assert self.shell
        known = self.shell.user_ns
        given = {CELL_NAME: text, **find_used_values(tree, options.use, known)}
        arguments = {"nproc": options.nproc, "device": options.device, "timeout_s": options.timeout}
        arguments["emulate"] = known.get(options.emulate, options.emulate) or None
        outcome: RunResult | LabError
        try:
            outcome = result = run_with_payload(PROGRAM, given, **arguments)
            show_output({rank.rank: rank.log() for rank in result.ranks})
            show_values(result)
        except ParameterError as refused:
            raise replace_traceback(refused, str(refused)) from None
        except KeyboardInterrupt as stopped:
            raise replace_traceback(stopped, interrupt_text(stopped, text)) from None
        except (RankFailed, RunTimedOut) as error:
            outcome, log = error, ""
            if isinstance(error, RankFailed):
                show_output(output_before_failure(error))
                said, log = failure_text(error, text, known), f"\nits output: {error.log}"
            else:
                said = timeout_text(error, text)
            if not options.fails:
                raise replace_traceback(error, said + log) from None
            print(said, file=sys.stderr)
        if name:
            known[name] = outcome


def parse_cell(text: str) -> ast.Module:
    """Return the code of a cell; raise a ParameterError, which IPython shows alone, if invalid."""
    try:
        tree = ast.parse(text, CELL_NAME)
        # This finds errors that parsing does not, such as return outside a function.
        compile(tree, CELL_NAME, "exec")
    except SyntaxError as error:
        place = mark_line(text, error.lineno or 2)
        said = f"{place}\nSyntaxError: {error.msg}. Nothing was started."
        raise replace_traceback(ParameterError(), said) from None
    return tree


def find_used_values(tree: ast.AST, names: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's values of the names after --use, and its modules that the code uses."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := ", ".join(name for name in wanted if name not in known):
        fix = "run the cell that makes it first"
        raise UsageError(f"--use {unknown}: the notebook has no such name; {fix}")
    used = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    modules = [name for name in used if isinstance(known.get(name), types.ModuleType)]
    return {name: known[name] for name in (*modules, *wanted)}


def show_output(logs: Mapping[int, str]) -> None:
    """Print the ranks' output, once where several ranks have printed the same."""
    for who, log in group_by_text(logs):
        for line in log.splitlines():
            print(f"[{who}] {line}")


def show_values(result: RunResult) -> None:
    """Print the values of the cell's last line."""
    having = [r for r in result.ranks if VALUE_ARTIFACT in r.folder.artifact_names(r.rank)]
    for who, value in group_by_text({r.rank: r.artifact(VALUE_ARTIFACT) for r in having}):
        print(f"{who}:{chr(10) if chr(10) in value else ' '}{value}")


def group_by_text(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return each different text that is not empty with its ranks, such as ("ranks 0–3", "…")."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        if text:
            ranks.setdefault(text, []).append(rank)
    return [(rank_list_text(having), text) for text, having in ranks.items()]


def rank_list_text(ranks: list[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0–3", "ranks 0, 2–3"."""
    parts = []
    # Ranks that follow each other differ from their places by the same number.
    for _, places in itertools.groupby(enumerate(ranks), lambda place: place[1] - place[0]):
        group = [str(rank) for _, rank in places]
        parts.append("–".join(dict.fromkeys([group[0], group[-1]])))
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(parts)}"


def output_before_failure(failure: RankFailed) -> dict[int, str]:
    """Return the output of a failed run's ranks, without the tracebacks of what ended them."""
    folder = RunFolder(failure.log.parent)
    outputs = {}
    for path in sorted(folder.path.glob("rank_*.log")):
        rank, log = int(path.stem.removeprefix("rank_")), path.read_text(errors="replace")
        # An exception that has a cause prints several tracebacks, and they come last.
        chain = read_json(folder.error(rank)).get("traceback", "").count(TRACEBACK_HEADER)
        parts = log.split(TRACEBACK_HEADER)
        before = TRACEBACK_HEADER.join(parts[: max(1, len(parts) - chain)])
        outputs[rank] = re.sub(r"(\[rank\d+\]: ?|  \+ Exception Group )*$", "", before)
    return outputs


def failure_text(failure: RankFailed, text: str, known: Mapping[str, Any]) -> str:
    """Describe what happened, on which rank, with the lines of the cell around it, marked."""
    lines = [f"rank {failure.rank} failed: {failure.exc_type}: {failure.message}".rstrip(": ")]
    numbers = [int(number) for number in CELL_FRAME_PATTERN.findall(failure.traceback)]
    lines += [mark_line(text, numbers[-1])] if numbers else []
    missing = re.match(r"name '(\w+)' is not defined", failure.message)
    if failure.exc_type == "NameError" and missing and missing[1] in known:
        fix = f"hand it to the ranks with --use {missing[1]}"
        lines.append(f"{missing[1]} is a name of the notebook: {fix}")
    return "\n".join(lines)


def timeout_text(late: RunTimedOut, text: str) -> str:
    """Return the line of the cell in which every rank was at the time limit."""
    first = f"no end after {late.timeout_s:g} s (--timeout allows more). Where each rank was:"
    return f"{first}\n{places_text(late.stacks, text)}"


def interrupt_text(stopped: KeyboardInterrupt, text: str) -> str:
    """Return the line of the cell in which every rank was when the reader stopped the cell."""
    if not (stacks := getattr(stopped, "stacks", {})):
        return "stopped before a rank ran"
    return f"stopped, and no rank is left. Where each rank was:\n{places_text(stacks, text)}"


def places_text(stacks: Mapping[int, str], text: str) -> str:
    """Return the marked line of the cell that each stack was at, once for ranks that share it."""
    places = {}
    for rank, stack in sorted(stacks.items()):
        places[rank] = f"not in the cell: {stack.strip()}"
        pending = [line for line in stack.splitlines() if line.startswith(PENDING_WORDS)]
        for thread in stack.split("\n\n"):
            # The innermost line comes first in a thread, and the main thread last of all.
            if numbers := CELL_FRAME_PATTERN.findall(thread):
                places[rank] = "\n".join([mark_line(text, int(numbers[0])), *pending])
    return "\n".join(f"{who}:\n{place}" for who, place in group_by_text(places))


def mark_line(text: str, number: int) -> str:
    """Return some lines of a cell with their numbers, and an arrow at one."""
    lines = []
    for each, line in enumerate(text.rstrip().split("\n"), 1):
        lines.append(f"{'-->' if each == number else '':3} {each:3} | {line}")
    # The first line is the magic's.
    return "\n".join(lines[max(1, number - CONTEXT_LINES - 1) : number + CONTEXT_LINES])


def replace_traceback(error: AnyError, text: str) -> AnyError:
    """Return the same error, which IPython then shows as this text instead of labkit's frames."""
    error.args = (text,)
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    return error
