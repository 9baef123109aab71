"""Lab 7's mystery runs: real ranks train with a hidden fault, and tools show what they saw of it.

case = Mystery(5)
case.ask("stacks")
case.name(rank=2, cause="fewer batches", because="stacks: rank 2")

KnownFault("slow link", rank=3) runs with a fault that is told, and shows what any tool shows of it;
KnownFault("wrong scale") has one that no single rank is to blame for. HealthyRun() has none, and
KnownFault("nan", rank=2, healthy=HealthyRun()) shows both.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from statistics import mean, median_low
from typing import Any

import pandas

import labkit
from labkit.runs import private_files
from labkit.runs.folder import RunFolder, read_json
from labkit.theory.failures import ABORT_STATUS
from labkit_course.checks.judge import Verdict, value_text
from labkit_course.checks.ranks import mystery as program
from labkit_course.checks.ranks.mystery import (
    ALL_RANKS,
    CAUSES,
    LAYERS,
    LINKS,
    QUIET_S,
    RANKS,
    draw_fault,
)

MOST_TOOLS, TIMEOUT_S = 3, 60.0
HEALTHY_STEP_MS = "10 to 40"
NO_FAULT = "none"
COLUMNS = [f"rank {index}" for index in range(RANKS)]
NOTHING = "–"
TOOLS = {
    "ends": "how each rank ended: its exit status, and its error",
    "logs": "the last lines of each rank's log",
    "stacks": "the calls in which each rank stood when the run was stopped",
    "record": "all-reduces where ranks part, as the script's own label step.layer; … is not done",
    "times": "where the time of the fastest step went, in ms",
    "links": "ms that a message takes one way, over each link of the ring",
    "losses": "each rank's own loss, before anything is reduced",
    "weights": "how far the weights of a rank are from those of most ranks",
    "gradients": "the first step's averaged gradient = factor × one device's + rest, "
    "whose norm is relative to one device's",
    "samples": "the first samples that each rank read; no two ranks should share one",
}


class Mystery:
    """One run with a hidden fault; the same seed gives the same fault."""

    most_tools = MOST_TOOLS
    healthy: "HealthyRun | None" = None

    def __init__(self, seed: int, *, beside: bool = False) -> None:
        """Run it on real ranks, which takes a few seconds.

        Args:
            seed: which mystery.
            beside: run the same data without a fault as well, so that each tool shows both.
        """
        self.seed, self.asked = seed, list[str]()
        self._seen = run_with_fault(seed=seed)
        if beside:
            self.healthy = HealthyRun(seed)

    def __repr__(self) -> str:
        return f"Mystery {self.seed}. {self._seen.symptom}"

    def ask(self, tool: str = "") -> None:
        """Print what a tool shows, for at most three tools; without a name, list the tools."""
        if tool not in TOOLS:
            print("\n".join(f"{name:10} {what}" for name, what in TOOLS.items()))
            return
        if tool not in self.asked and len(self.asked) == self.most_tools:
            print(f"You have asked {', '.join(self.asked)}: now name the rank and the cause.")
            return
        self.asked = list(dict.fromkeys([*self.asked, tool]))
        print(self._seen.text(tool))
        if self.healthy:
            print(self.healthy.text_beside(tool, self._seen.table(tool)))

    def table(self, tool: str) -> pandas.DataFrame:
        """Return what a tool has shown, which costs nothing."""
        if tool not in self.asked:
            raise ValueError(f"ask({tool!r}) first: only what was shown is here")
        return self._seen.table(tool)

    def name(self, rank: int | None, cause: str, because: str) -> Verdict:
        """Judge a rank (None: all of them), one of CAUSES, and a line of evidence, "tool: row"."""
        return judge_diagnosis(self.seed, (rank, cause, because))


class KnownFault(Mystery):
    """A run with a fault that is told, of which one may ask every tool."""

    most_tools = len(TOOLS)

    def __init__(
        self,
        cause: str,
        rank: int | None = None,
        layer: int = LAYERS - 1,
        *,
        healthy: "HealthyRun | None" = None,
    ) -> None:
        """Run it on real ranks, which takes a few seconds.

        Args:
            cause: one of CAUSES.
            rank: the rank at fault; None for a fault of all ranks.
            layer: whose gradient is left out, or has another shape (of layer 1, float64).
            healthy: a run without a fault, HealthyRun(), for each tool to show as well.
        """
        require_cause(cause, rank)
        self.healthy = healthy
        self.cause, self.rank, self.asked = cause, rank, list[str]()
        self._seen = run_with_fault(cause=cause, rank=rank or 0, layer=layer)

    def __repr__(self) -> str:
        return f"{self._told}. {self._seen.symptom}"

    @property
    def _told(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        return f"{self.cause!r} on {where}"

    @property
    def ends(self) -> list[dict[str, Any]]:
        """How each rank ended: its ``rank status time error``."""
        return self._seen.ends

    def calls(self, *, labels: bool) -> list[list[tuple[str, ...]]]:
        """Return each rank's all-reduces as (name, shape and dtype), or with the label in front."""
        return [
            [call if labels else call[1:] for call in map(_split_call, lines)]
            for lines in map(_read_calls, self._seen.lines["record"])
        ]

    def ask(self, tool: str = "") -> None:
        """Print what a tool shows, under the fault that is known and, at first, its symptom."""
        print(f"Known fault: {self._told if self.asked else repr(self)}")
        super().ask(tool)

    def table(self, tool: str) -> pandas.DataFrame:
        """Return what a tool shows, asked or not."""
        return self._seen.table(tool)

    def name(self, rank: int | None, cause: str, because: str) -> Verdict:
        """Refuse, since nothing is left to find."""
        raise ValueError(f"the fault is known: {self._told}")


class HealthyRun:
    """A run without a fault, and what every tool shows of it, in a fold."""

    def __init__(self, seed: int = 0) -> None:
        """Run it on real ranks, which takes a few seconds, with the data of this mystery."""
        self._seen = run_with_fault(cause=NO_FAULT, seed=seed)

    def text_beside(self, tool: str, other: pandas.DataFrame) -> str:
        """Return what a tool shows, for the record in the same rows as another run's table."""
        table = self._seen.table(tool)
        if tool == "record" and not other.empty:
            table = self._seen.calls([int(row.split()[1]) for row in other.index])
        if tool == "stacks":
            return "healthy, same data: it ended, so no stacks were taken"
        return f"healthy, same data:\n{table.to_string()}"

    def table(self, tool: str) -> pandas.DataFrame:
        """Return what a tool shows."""
        return self._seen.table(tool)

    @property
    def symptom(self) -> str:
        """What anybody would see of it without a tool, such as its loss."""
        return self._seen.symptom

    def __repr__(self) -> str:
        return "\n\n".join(["A healthy run.", self.symptom, *map(self._seen.text, TOOLS)])

    def _repr_html_(self) -> str:
        head = "<summary>A healthy run, with every tool</summary>"
        return f"<details>{head}<pre>{escape(repr(self))}</pre></details>"


def show_causes() -> None:
    """Print the causes, each with what it means."""
    print("\n".join(f"{cause:14} {meaning}" for cause, meaning in CAUSES.items()))


def require_cause(cause: str, rank: int | None) -> None:
    """Raise ValueError for a cause that is none of one rank, or, without a rank, none of all."""
    choices = [each for each in CAUSES if (each in ALL_RANKS) == (rank is None)]
    if cause not in choices:
        of = "all ranks" if rank is None else "one rank"
        raise ValueError(f"{cause!r} is no fault of {of}; choose one of {', '.join(choices)}")


def run_with_fault(**fault: Any) -> "Findings":
    """Run the program with a fault on real ranks, and return what it left behind."""
    ends: list[dict[str, Any]] = []
    with private_files.temporary_folder() as folder:
        how: dict[str, Any] = {"nproc": RANKS, "device": "cpu", "timeout_s": TIMEOUT_S}
        try:
            labkit.run(Path(program.__file__), **how, **fault, folder=str(folder))
        except labkit.RankFailed as failure:
            ends = rank_ends(failure)
            for end in ends:
                if end["status"] == ABORT_STATUS:
                    _keep_last_words(failure.log, folder, end["rank"])
        return Findings(folder, ends)


def _keep_last_words(log: Path, folder: Path, index: int) -> None:
    """Append to a rank's log what gloo said when it aborted the process, if it said a size."""
    said = log.with_name(f"rank_{index:05d}.log").read_text(errors="replace")
    if found := re.search(r"(\d+ vs \d+)\. (Received data size[^.\n]*)", said):
        with open(folder / f"log_{index}.txt", "a") as file:
            file.write(f"{found[2]}: {found[1]} bytes\n")


def judge_diagnosis(seed: int, named: Any) -> Verdict:
    """Compare a rank, a cause and a line of evidence with the fault of a seed."""
    fault = draw_fault(seed)
    if not (isinstance(named, tuple | list) and len(named) == 3):
        said = f"mystery {seed}: {value_text(named)} is not (rank, cause, line)"
        return Verdict("wrong", said, hint='The line is "tool: row", such as "stacks: rank 0".')
    rank, cause, line = named
    if not (isinstance(cause, str) and cause in CAUSES):
        said = f"mystery {seed}: {value_text(cause)} is none of the causes"
        return Verdict("wrong", said, hint=", ".join(CAUSES))
    right = f"{blame_text(fault.rank)}, {fault.cause!r}"
    is_known = rank is None or (isinstance(rank, Integral) and not isinstance(rank, bool))
    is_rank = is_known and rank == fault.rank
    if is_rank and cause == fault.cause:
        return _judge_line(seed, fault, line)
    if is_rank:
        said, hint = f"{blame_text(rank)} is right, {cause!r} is not", "What else would show this?"
    elif cause == fault.cause:
        said, hint = f"{cause!r} is right, {blame_text(rank)} is not", "Who differs from the rest?"
    else:
        said, hint = f"neither {blame_text(rank)} nor {cause!r}", "Begin again with the symptom."
    return Verdict("wrong", f"mystery {seed}: {said}", right, hint)


def _judge_line(seed: int, fault: program.Fault, line: Any) -> Verdict:
    """Judge the evidence for a diagnosis that is right."""
    shown = " ".join(line.split()) if isinstance(line, str) else value_text(line)
    named = f"{blame_text(fault.rank)}, {fault.cause!r}"
    if shown in fault.lines():
        said = f"mystery {seed}: {blame_text(fault.rank)}: {CAUSES[fault.cause]}; seen in {shown}"
        return Verdict("passed", said)
    tool, colon, _ = shown.partition(": ")
    right = " or ".join(fault.lines())
    if not colon or tool not in TOOLS:
        said = f"{named} is right, {shown!r} is not the line of a tool"
        hint = 'Write "tool: row" as they are printed, such as "stacks: rank 0".'
    else:
        said = f"{named} is right, {shown!r} does not prove it"
        hint = "Which line would not be there with any other cause on the list?"
    return Verdict("wrong", f"mystery {seed}: {said}", right, hint)


def blame_text(rank: Any) -> str:
    """Name a rank, or all of them."""
    return "no single rank" if rank is None else f"rank {value_text(rank)}"


def rank_ends(failure: labkit.RankFailed) -> list[dict[str, Any]]:
    """Return how each rank of a failed run ended: its ``rank status time error``."""
    folder = RunFolder(failure.log.parent)
    errors = [read_json(path) for path in folder.path.glob("rank_*.error.json")]
    ends = {
        each["rank"]: each | {"status": 1, "error": f"{each['exc_type']}: {each['message']}"}
        for each in errors
        if each
    }
    # How torchrun saw them.
    for each in read_json(folder.exit_json()).get("failures", []):
        own = ends.get(each["rank"], {})
        ends[each["rank"]] = {"error": ""} | each | own | {"status": each["exitcode"]}
    names = ("rank", "status", "time", "error")
    return [{name: ends[index][name] for name in names} for index in sorted(ends)]


def ends_table(ends: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Return the same as a table: seconds after the first error, for ranks that have one."""
    first = min((each["time"] for each in ends if each["error"]), default=0.0)
    rows = {
        f"rank {each['rank']}": {
            "status": each["status"],
            "s after the first error": f"{each['time'] - first:.2f}" if each["error"] else NOTHING,
            "error": re.sub(r"\[/.*?\] | \[127.*", "", each["error"].split("\n")[0]),
        }
        for each in ends
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


class Findings:
    """What a run left behind, as one table for each tool."""

    def __init__(self, folder: Path, ends: list[dict[str, Any]]) -> None:
        """Read all files, since the folder goes when the run is over."""
        self.ends = ends
        self.lines = {
            kind: [_read_lines(folder / f"{kind}_{index}.txt") for index in range(RANKS)]
            for kind in ("log", "stack", "record")
        }
        paths = [folder / f"found_{index}.json" for index in range(RANKS)]
        self.found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]

    @property
    def symptom(self) -> str:
        """What anybody would see without a tool."""
        if self.hangs:
            return f"No rank has made a step for {QUIET_S:g} s, so the run was stopped."
        if self.ends:
            return "The run failed. torchrun names several ranks, and stops the others."
        losses = [
            mean(each) for each in zip(*(found["losses"] for found in self.found), strict=True)
        ]
        step_ms = min(found["times"]["step ms"] for found in self.found)
        pace = f"Its fastest step took {step_ms:.0f} ms; about {HEALTHY_STEP_MS} is usual"
        return f"The run ended. Loss: {losses[0]:.3f} … {losses[-1]:.3f}. {pace}."

    @property
    def hangs(self) -> bool:
        """Whether the run had to be stopped."""
        return any(self.lines["stack"])

    def table(self, tool: str) -> pandas.DataFrame:
        """Return what a tool shows; the table is empty if the run left nothing for it."""
        table: pandas.DataFrame = getattr(self, f"_{tool}")()
        return table

    def text(self, tool: str) -> str:
        """Return the same as text, under what the tool means."""
        table = self.table(tool)
        shown = "nothing: the run left no such trace" if table.empty else table.to_string()
        return f"{tool}: {TOOLS[tool]}\n{shown}"

    def _ends(self) -> pandas.DataFrame:
        well = {"status": 0, "time": 0.0, "error": ""}
        if not self.ends and all(self.found):
            return ends_table([{"rank": index, **well} for index in range(RANKS)])
        # The ranks of a run that was stopped have nothing to say about its cause.
        return ends_table([] if self.hangs else self.ends)

    def _logs(self) -> pandas.DataFrame:
        texts = [" / ".join(lines[-2:]) for lines in self.lines["log"]]
        return _by_rank({"last lines": texts}) if any(texts) else pandas.DataFrame()

    def _stacks(self) -> pandas.DataFrame:
        texts = [" → ".join(lines) or NOTHING for lines in self.lines["stack"]]
        return _by_rank({"calls, the innermost last": texts}) if self.hangs else pandas.DataFrame()

    def _record(self) -> pandas.DataFrame:
        calls = [_read_calls(lines) for lines in self.lines["record"]]
        places = list(zip_longest(*calls, fillvalue=NOTHING))
        differ = [len({call.removesuffix(" …") for call in each}) > 1 for each in places]
        first = differ.index(True) if True in differ else len(places) - 1
        # One call before, and so many after that a swap is over.
        return self.calls(range(max(0, first - 1), min(len(places), first + 4)))

    def calls(self, shown: Sequence[int]) -> pandas.DataFrame:
        """Return these of the ranks' all-reduces, as far as there are any."""
        calls = [_read_calls(lines) for lines in self.lines["record"]]
        places = list(zip_longest(*calls, fillvalue=NOTHING))
        shown = [place for place in shown if place < len(places)]
        rows = {f"call {place}": dict(zip(COLUMNS, places[place], strict=True)) for place in shown}
        return pandas.DataFrame.from_dict(rows, orient="index")

    def _times(self) -> pandas.DataFrame:
        if not all(found.get("times") for found in self.found):
            return pandas.DataFrame()
        parts = ("swap ms", "compute ms", "reduce ms")
        return _by_rank({part: [_ms(each["times"][part]) for each in self.found] for part in parts})

    def _links(self) -> pandas.DataFrame:
        links = {name: ms for found in self.found for name, ms in found.get("links", {}).items()}
        names = [f"{a} → {b}" for pair in LINKS for a, b in (pair, pair[::-1])]
        rows = {f"rank {name}": {"ms": _ms(links[name])} for name in names if name in links}
        return pandas.DataFrame.from_dict(rows, orient="index")

    def _losses(self) -> pandas.DataFrame:
        rows = [
            re.findall(r"^step .*: loss (\S+)$", "\n".join(each), re.M)
            for each in self.lines["log"]
        ]
        steps = dict(enumerate(zip_longest(*rows, fillvalue=NOTHING)))
        names = {
            f"step {step}": dict(zip(COLUMNS, each, strict=True)) for step, each in steps.items()
        }
        return pandas.DataFrame.from_dict(names, orient="index")

    def _weights(self) -> pandas.DataFrame:
        if not all(self.found):
            return pandas.DataFrame()
        return _by_rank({name: _distances(self.found, name) for name in ("start", "end")})

    def _gradients(self) -> pandas.DataFrame:
        if not all("gradient" in found for found in self.found):
            return pandas.DataFrame()
        factors = [f"{found['gradient'][0]:.3f}" for found in self.found]
        rests = [f"{found['gradient'][1]:.1e}" for found in self.found]
        return _by_rank({"factor": factors, "rest": rests})

    def _samples(self) -> pandas.DataFrame:
        samples = [found.get("samples", []) for found in self.found]
        if not all(samples):
            return pandas.DataFrame()
        sharing = [
            [
                rank
                for rank in range(RANKS)
                if rank != own and set(samples[rank]) & set(samples[own])
            ]
            for own in range(RANKS)
        ]
        shared = [", ".join(f"rank {rank}" for rank in ranks) or NOTHING for ranks in sharing]
        texts = [", ".join(map(str, each)) for each in samples]
        return _by_rank({"step 0": texts, "shared with": shared})


def _by_rank(columns: dict[str, list[str]]) -> pandas.DataFrame:
    return pandas.DataFrame(columns, index=COLUMNS)


def _ms(value: float) -> str:
    return f"{value:.1f}"


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _read_calls(lines: Sequence[str]) -> list[str]:
    """Return the calls of a record; one that has not returned ends in "…"."""
    calls: list[str] = []
    for line in lines:
        if line != "done":
            calls.append(f"{line} …")
        elif calls:
            calls[-1] = calls[-1].removesuffix(" …")
    return calls


def _split_call(call: str) -> tuple[str, ...]:
    """Return a call's label, name, and shape with dtype."""
    label, _, what = call.removesuffix(" …").partition(" ")
    return label, "all_reduce", what


def _distances(found: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Return each rank's largest difference from the value that most ranks have."""
    usual = [median_low(values) for values in zip(*(each[name] for each in found), strict=True)]
    gaps = [max(abs(a - b) for a, b in zip(each[name], usual, strict=True)) for each in found]
    return [f"{gap:.3g}" for gap in gaps]
