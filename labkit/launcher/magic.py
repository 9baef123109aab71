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
import keyword
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.errors import LabError, ParameterError, RankFailed, RunTimedOut
from labkit.launcher.run import run_with_payload
from labkit.runs.folder import RunFolder, read_json
from labkit.runs.result import RunResult

PROGRAM = Path(__file__).resolve().parents[1] / "session" / "cell.py"
# The same values as in session/cell.py, which would import torch.
CELL_NAME, VALUE_ARTIFACT = "<cell>", "value"
CELL_FRAME_PATTERN = re.compile(rf'File "{CELL_NAME}", line (\d+)')
TRACEBACK_HEADER = "Traceback (most recent call last):"
CONTEXT_LINES = 2


@magics_class
class TorchrunMagics(Magics):
    """Holds the cell magic."""

    @magic_arguments()
    @argument("-n", "--nproc", type=int, default=2, help="number of ranks; 2 by default")
    @argument(
        "--timeout",
        type=float,
        default=60,
        help="the ranks are stopped after so many seconds; 60 by default",
    )
    @argument(
        "--name",
        default="",
        help="the notebook's name for the result, a labkit.RunResult, or for what --fails showed",
    )
    @argument("--device", default="auto", help="auto, cpu or cuda")
    @argument(
        "--fails",
        action="store_true",
        help="the cell is meant to fail: show in red how, and let the notebook go on",
    )
    @argument(
        "--use",
        default="",
        help="names of the notebook that the cell uses, with commas; modules come anyway",
    )
    @cell_magic
    def torchrun(self, line: str, cell: str) -> None:
        """Run this cell on real ranks, each a new process that torchrun starts."""
        options = parse_argstring(self.torchrun, line)
        if options.name and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
            raise UsageError(
                f"--name {options.name} is no name for a value: use letters, digits and _"
            )
        # The first line of the cell is the magic's; this keeps the line numbers right.
        text = "\n" + cell
        tree = parse_cell(text)
        assert self.shell
        known = self.shell.user_ns
        names = {**find_modules(tree, known), **lookup_names(options.use, known)}
        arguments = {"nproc": options.nproc, "device": options.device, "timeout_s": options.timeout}
        try:
            result = run_with_payload(PROGRAM, {CELL_NAME: text, **names}, **arguments)
        except ParameterError as refused:
            raise replace_traceback(refused, str(refused)) from None
        except RankFailed as failure:
            show_output(output_before_failure(failure))
            said = failure_text(failure, text, known)
            if options.fails:
                return self.show_failure(options.name, failure, said)
            raise replace_traceback(failure, f"{said}\nits output: {failure.log}") from None
        except RunTimedOut as late:
            said = timeout_text(late, text)
            if options.fails:
                return self.show_failure(options.name, late, said)
            raise replace_traceback(late, said) from None
        show_output({rank.rank: rank.log() for rank in result.ranks})
        show_values(result)
        if options.name:
            known[options.name] = result

    def show_failure(self, name: str, error: LabError, said: str) -> None:
        """Show in red how a cell failed that was meant to fail, and keep the error under its name,
        if it has one.
        """
        print(said, file=sys.stderr)
        if name and self.shell:
            self.shell.user_ns[name] = error


def parse_cell(text: str) -> ast.Module:
    """Return the code of a cell. Raises ParameterError for invalid Python, which IPython shows
    without labkit's frames.
    """
    try:
        tree = ast.parse(text, CELL_NAME)
        # This finds errors that parsing does not, such as return outside a function.
        compile(tree, CELL_NAME, "exec")
        return tree
    except SyntaxError as error:
        said = f"SyntaxError: {error.msg}. Nothing was started."
        place = mark_line(text, error.lineno or 2)
        raise replace_traceback(ParameterError(), f"{place}\n{said}") from None


def find_modules(tree: ast.AST, known: Mapping[str, Any]) -> dict[str, types.ModuleType]:
    """Return the notebook's modules that the code uses, by the notebook's names for them."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {
        name: known[name] for name in sorted(used) if isinstance(known.get(name), types.ModuleType)
    }


def lookup_names(names: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the names after --use."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(
            f"--use {', '.join(unknown)}: the notebook has no such name; run the cell that makes it"
            " first"
        )
    return {name: known[name] for name in wanted}


def show_output(logs: Mapping[int, str]) -> None:
    """Print the ranks' output, once where several ranks have printed the same."""
    for who, log in group_by_text(logs):
        for line in log.splitlines():
            print(f"[{who}] {line}")


def show_values(result: RunResult) -> None:
    """Print the values of the cell's last line."""
    values = {
        rank.rank: rank.artifact(VALUE_ARTIFACT)
        for rank in result.ranks
        if VALUE_ARTIFACT in rank.folder.artifact_names(rank.rank)
    }
    for who, value in group_by_text(values):
        print(f"{who}:{chr(10) if chr(10) in value else ' '}{value}")


def group_by_text(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return each different text with its ranks, such as ("ranks 0–3", "…"); empty texts are left
    out.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        if text:
            ranks.setdefault(text, []).append(rank)
    return [(rank_list_text(having), text) for text, having in ranks.items()]


def rank_list_text(ranks: list[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0–3", "ranks 0, 2–3"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [f"{part[0]}–{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(words)}"


def output_before_failure(failure: RankFailed) -> dict[int, str]:
    """Return the output of a failed run's ranks, without the failing one's traceback at the end."""
    folder = RunFolder(failure.log.parent)
    paths = {int(path.stem.removeprefix("rank_")): path for path in folder.path.glob("rank_*.log")}
    logs = {rank: path.read_text(errors="replace") for rank, path in paths.items()}
    return {rank: strip_traceback(log, folder.error(rank)) for rank, log in sorted(logs.items())}


def strip_traceback(log: str, error: Path) -> str:
    """Remove the tracebacks of the error that ended a rank from its output."""
    chain = read_json(error).get("traceback", "").count(TRACEBACK_HEADER)
    parts = log.split(TRACEBACK_HEADER)
    return re.sub(
        r"(\[rank\d+\]: ?|  \+ Exception Group )*$",
        "",
        TRACEBACK_HEADER.join(parts[: max(1, len(parts) - chain)]),
    )


def failure_text(failure: RankFailed, text: str, known: Mapping[str, Any]) -> str:
    """Describe what happened, on which rank, with the lines of the cell around it, marked."""
    lines = [f"rank {failure.rank} failed: {failure.exc_type}: {failure.message}".rstrip(": ")]
    numbers = [int(number) for number in CELL_FRAME_PATTERN.findall(failure.traceback)]
    lines += [mark_line(text, numbers[-1])] if numbers else []
    missing = re.match(r"name '(\w+)' is not defined", failure.message)
    if failure.exc_type == "NameError" and missing and missing[1] in known:
        lines.append(
            f"{missing[1]} is a name of the notebook: hand it to the ranks with --use {missing[1]}"
        )
    return "\n".join(lines)


def timeout_text(late: RunTimedOut, text: str) -> str:
    """Return the line of the cell in which every rank was at the time limit."""
    lines = [f"no end after {late.timeout_s:g} s (--timeout allows more). Where each rank was:"]
    places = {rank: main_thread_line(stack) for rank, stack in sorted(late.stacks.items())}
    said = {
        rank: (
            mark_line(text, int(number))
            if number
            else "not in the cell: " + late.stacks[rank].strip()
        )
        for rank, number in places.items()
    }
    return "\n".join([*lines, *(f"{who}:\n{place}" for who, place in group_by_text(said))])


def main_thread_line(stack: str) -> str | None:
    """Return the innermost line of the cell in the oldest thread that runs it."""
    threads = [CELL_FRAME_PATTERN.findall(thread) for thread in stack.split("\n\n")]
    return next((lines[0] for lines in reversed(threads) if lines), None)


def mark_line(text: str, number: int) -> str:
    """Return some lines of a cell with their numbers, and an arrow at one."""
    numbered = list(enumerate(text.rstrip().split("\n"), start=1))[1:]
    near = [(each, line) for each, line in numbered if abs(each - number) <= CONTEXT_LINES]
    return "\n".join(
        f"{'-->' if each == number else '   '} {each:3} | {line}" for each, line in near
    )


def replace_traceback(error: LabError, text: str) -> LabError:
    """Return the same error, which IPython then shows as this text instead of labkit's frames."""
    error.args = (text,)
    error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]
    return error
