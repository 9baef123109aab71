"""The result of a run: its records as one table, numbers by name, each rank's output."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, RecordError
from labkit.runs import records
from labkit.runs.folder import JSON_FIX, RunFolder, read_json, require_fields
from labkit.runs.verdict import describe_error, describe_verdict
from labkit.theory.collectives import WIRE_FRACTIONS, collective_wire_bytes
from labkit.theory.emulated import Emulated, read_emulated

if TYPE_CHECKING:
    import pandas

FIELD_TYPES = {
    name: wanted for kind in records.FIELDS_BY_KIND.values() for name, wanted in kind.items()
}
MAX_RANKS = 1_000_000
MAX_SHOWN_CHARACTERS = 300
# What the notebook and the system use beside every run, and the finest time that Linux counts.
CORES_FOR_SYSTEM, COUNTED_S = 0.25, 0.01
# Fields that every run.json has.
RUN_JSON_TYPES = {"program": str, "params": dict, "nproc": int, "exit": str}
# Fields of run.json besides, where ranks were simulated.
SIMULATION_TYPES = {"ranks": list, "ranks_per_host": int}
# Fields of the objects in run.json, which need not be there.
PART_TYPES: dict[str, dict[str, type]] = {
    "hardware": {"name": str},
    "verdict": {"ok": bool, "compared": object},
    "session": {"device": str, "device_name": str, "cores": int, "torch": str},
}


class UnknownValue(LabError, KeyError):
    """A result has no value of this name. The message lists those it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class RunFileNotFound(LabError, FileNotFoundError):
    """The folder is not that of a run, or a rank saved no text of this name."""


@dataclass(frozen=True)
class RankOutput:
    """The output of one rank beside its records."""

    rank: int
    folder: RunFolder

    def log(self) -> str:
        """Everything this rank printed; "" if it never started."""
        return _read_if_there(self.folder.log(self.rank))

    @cached_property
    def reported(self) -> dict[str, Any]:
        """What this rank's program sent with ``labkit.rank.report``, by name; {} for nothing."""
        import torch

        path = self.folder.report(self.rank)
        content: dict[str, Any] = torch.load(path, weights_only=True) if path.exists() else {}
        return content

    def artifact(self, name: str) -> str:
        """Return the text that this rank's program saved with ``here.save_artifact``."""
        path = self.folder.artifact(self.rank, name)
        if not path.exists():
            names = ", ".join(self.folder.artifact_names(self.rank)) or "nothing"
            fix = "take one of these, or run a program that calls here.save_artifact with this name"
            raise RunFileNotFound(
                f"rank {self.rank} kept no {name!r} in {self.folder.path}, it kept {names}: {fix}"
            )
        return path.read_bytes().decode(errors="replace")


@dataclass(frozen=True, repr=False)
class RunResult:
    """One finished run, read from its folder: the content of run.json, and all records in order."""

    folder: Path
    info: dict[str, Any]
    lines: list[dict[str, Any]]
    # Record files whose last line is cut off, because a rank was killed.
    incomplete_files: list[Path]

    @property
    def ok(self) -> bool:
        """Whether every rank ended well, and no check found a difference."""
        return self.info.get("exit") == "ok"

    @property
    def verdict(self) -> dict[str, Any]:
        """The result of the program's check: ok, compared, and more; {} if there was none."""
        return dict(self.info.get("verdict", {}))

    @property
    def verdict_text(self) -> str:
        """What the check compared, and whether it agrees, in words; "" if there was none."""
        return describe_verdict(self.verdict)

    @cached_property
    def losses(self) -> pandas.Series:
        """The mean loss over ranks by timed step, without steps that some rank did not record."""
        rows = self.frame.query("kind == 'scalar' and name == 'loss' and step >= 0")
        by_step = rows.groupby("step")["value"]
        return by_step.mean()[by_step.size() == by_step.size().max()]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.info["nproc"])

    @property
    def is_simulated(self) -> bool:
        """Whether ranks were simulated: sizes and counts of some, no values, estimated times."""
        return bool(self.info.get("simulated", False))

    @property
    def active_ranks(self) -> list[int]:
        """The ranks that ran: all of them, or those that were simulated."""
        return list(self.info["ranks"]) if self.is_simulated else list(range(self.world_size))

    @property
    def params(self) -> dict[str, Any]:
        """All parameters of the program, defaults included."""
        return dict(self.info["params"])

    @property
    def session(self) -> dict[str, Any]:
        """What the ranks ran on: device, device_name, backend, cores, threads, torch, note."""
        return dict(self.info["session"])

    @property
    def device(self) -> str:
        """The kind of device: "cpu", "cuda", "emulated" or "simulated"; "unknown" if no session was
        opened.
        """
        return str(self.session.get("device", "unknown"))

    @property
    def emulated(self) -> Emulated | None:
        """The hardware for whose times the ranks have waited, if they did."""
        return read_emulated(self.info.get("emulate"))

    @property
    def ranks(self) -> list[RankOutput]:
        """Each rank's output, by rank."""
        return [RankOutput(rank, RunFolder(self.folder)) for rank in range(self.world_size)]

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host, "" if it never started; () if all were on one host."""
        ranks = range(self.world_size)
        if self.is_simulated:
            names = tuple(f"host {rank // self.info['ranks_per_host']}" for rank in ranks)
        else:
            names = tuple(_read_if_there(RunFolder(self.folder).host(rank)) for rank in ranks)
        return names if len({*names} - {""}) > 1 else ()

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """All records, one row each; columns that a kind does not have are empty."""
        import pandas

        frame = pandas.DataFrame(self.lines, columns=["rank", "step", "kind", "name", *FIELD_TYPES])
        # One column at a time: beside empty cells, 64-bit integers would first become floats.
        for name, wanted in FIELD_TYPES.items():
            if wanted is int:
                frame[name] = pandas.array([line.get(name) for line in self.lines], dtype="Int64")
        return frame

    @cached_property
    def cores_of_others(self) -> float:
        """How many cores other programs used while steps were timed; 0 where it is not known."""
        names = records.TIMED_S, records.RANK_CORES, records.BUSY_CORES
        rows = [[values.get(name) for name in names] for values in self._rank_values.values()]
        if not rows or any(None in row for row in rows) or self.hosts:
            return 0.0
        timed_s, own, busy = zip(*rows, strict=True)
        # The system counts hundredths of a second, for each core.
        unsure = COUNTED_S * int(self.session.get("cores", 1)) / max(timed_s)
        others = float(max(busy) - sum(own))
        return others if others > CORES_FOR_SYSTEM + unsure else 0.0

    @property
    def stamp(self) -> str:
        """The origin of the numbers in one line: device, ranks, cores, torch version."""
        return stamp_text([self])

    def value(self, name: str) -> float:
        """Return one number of the run, or raise UnknownValue with the names that there are.

        | name                                 | meaning                                        |
        |--------------------------------------|------------------------------------------------|
        | a scalar, such as loss               | its last step, mean over ranks                 |
        | SPAN_ms                              | median of timed steps, of the slowest rank     |
        | MEMORY_bytes                         | the largest of all ranks and steps             |
        | COLLECTIVE_count, COLLECTIVE_bytes   | of a step, passed to calls, the largest rank's |
        | COLLECTIVE_wire_bytes                | that leave a rank in a ring                    |
        | COLLECTIVE_between_hosts_count, …    | the part of them that crosses hosts            |
        """
        values = self._value_by_name
        if name not in values:
            known = ", ".join(sorted(values.keys() - records.ABOUT_THE_RUN)) or "no records at all"
            raise UnknownValue(f"this run has no value {name!r}; it has: {known}")
        return values[name]

    def summary(self) -> pandas.DataFrame:
        """Return a row for each rank: its host if there are several, and its values by name."""
        import pandas

        rows = {
            rank: ({"host": self.hosts[rank]} if self.hosts else {})
            | self._rank_values.get(rank, {})
            for rank in self.active_ranks
        }
        table = pandas.DataFrame.from_dict(rows, orient="index").rename_axis("rank")
        return table.drop(columns=list(records.ABOUT_THE_RUN), errors="ignore")

    def table_text(self) -> str:
        """Return the summary as text: a row for each value, a column for each rank."""
        table = self.summary().map(_value_text).T
        # Ranks that do not fit beside each other follow in further blocks.
        return table.to_string(line_width=shutil.get_terminal_size((100, 24)).columns)

    # Both are cached, because an explorer reads many values while a control is moved.
    @cached_property
    def _rank_values(self) -> dict[int, dict[str, Any]]:
        by_rank = self.frame.groupby("rank")
        return {int(rank): _values_by_name(rows, bool(self.hosts)) for rank, rows in by_rank}

    @cached_property
    def _value_by_name(self) -> dict[str, float]:
        scalars = set(self.frame.loc[self.frame["kind"] == "scalar", "name"])
        found: dict[str, list[float]] = {}
        for values in self._rank_values.values():
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        return {
            name: sum(values) / len(values) if name in scalars else max(values)
            for name, values in found.items()
        }

    def __repr__(self) -> str:
        return "\n".join([*self._headlines(), self.table_text(), *self._warnings()])

    def _repr_html_(self) -> str:
        headlines, warnings = (
            "".join(f"<p>{escape(line)}</p>" for line in lines)
            for lines in (self._headlines(), self._warnings())
        )
        return f"{headlines}{self.summary().round(3).to_html()}{warnings}"

    def _headlines(self) -> list[str]:
        state = "" if self.ok else f" [{self.info.get('exit')}]"
        verdict = " · ".join(filter(None, [self.verdict_text, describe_error(self.verdict)]))
        return [f"{self.info['program']}{state}: {self.stamp}", *([verdict] if verdict else [])]

    def _warnings(self) -> list[str]:
        cut = "the last line is cut off (the rank was killed while it wrote)"
        return [f"{path.name}: {cut}" for path in self.incomplete_files] + disturbances([self])


def _value_text(value: Any) -> str:
    if not isinstance(value, Real):
        return str(value)
    # A rank without this value has nan.
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def _read_if_there(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def stamp_text(results: Iterable[RunResult]) -> str:
    """Return the origin of several runs' numbers: a line for each machine and torch."""
    results = list(results)
    ranks: dict[tuple[str, int, int, str, str], set[int]] = {}
    for result in results:
        session = result.session
        device = str(session.get("device_name") or result.device)
        if result.info.get("hardware"):
            device += f" · estimated for {result.info['hardware']['name']}"
        cores = int(session.get("cores", 0)) if result.device == "cpu" else 0
        version = f"torch {session['torch']}" if "torch" in session else ""
        origin = device, len({*result.hosts} - {""}), cores, version, str(session.get("note") or "")
        ranks.setdefault(origin, set()).add(result.world_size)
    lines = [_stamp_line(*origin, sorted(counts)) for origin, counts in ranks.items()]
    return "\n".join(lines + disturbances(results))


def disturbances(results: Iterable[RunResult]) -> list[str]:
    """Return a line that says how much other programs disturbed these runs, or none."""
    found = [result.cores_of_others for result in results]
    disturbed = [cores for cores in found if cores]
    if not disturbed:
        return []
    which = f" in {len(disturbed)} of {len(found)} runs" if len(found) > 1 else ""
    return [f"disturbed: other programs used up to {max(disturbed):.1f} cores{which}; run it again"]


def _stamp_line(
    device: str, hosts: int, cores: int, version: str, note: str, ranks: list[int]
) -> str:
    *others, last = map(str, ranks)
    counted = f"{', '.join(others)} and {last} ranks" if others else _count_text(ranks[0], "rank")
    places = [_count_text(hosts, "host")] if hosts > 1 else []
    places += [_count_text(cores, "core")] if cores else []
    if places:
        counted += f" on {' with '.join(places)}"
    crowded = [count for count in ranks if cores and count > cores]
    warning = "mechanism, not speed" if crowded else ""
    if crowded and crowded != ranks:
        warning = f"{', '.join(map(str, crowded))} ranks: {warning}"
    return " · ".join(filter(None, [device, counted, warning, version, note]))


def _count_text(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def load(folder: str | Path) -> RunResult:
    """Read the result of an earlier run from its folder; RecordError names a malformed file."""
    path = Path(folder).resolve()
    if not os.path.exists(RunFolder(path).run_json):
        rule = "give the folder of a run, such as runs/20260131-120000-name-a1b2c3"
        raise RunFileNotFound(f"{str(path)[:MAX_SHOWN_CHARACTERS]} holds no run.json: {rule}")
    info = _read_run_info(RunFolder(path))
    found = records.read_records(path, info["nproc"])
    return RunResult(path, info, found.lines, found.incomplete_files)


def _read_run_info(folder: RunFolder) -> dict[str, Any]:
    # A run that did not end properly has what its ranks ran on in session.json alone.
    path = folder.run_json
    info = read_json(path)
    if info.get("version", 1) not in records.READABLE_VERSIONS:
        fix = f"update labkit, this one reads {' and '.join(map(str, records.READABLE_VERSIONS))}"
        raise RecordError(f"{path}: version {info['version']!r} is not known here: {fix}")
    require_fields(path, info, RUN_JSON_TYPES | (SIMULATION_TYPES if info.get("simulated") else {}))
    if not 0 < info["nproc"] <= MAX_RANKS:
        rule = f"is not between 1 and {MAX_RANKS}"
        raise RecordError(f"{path}: nproc = {info['nproc']} {rule}. {JSON_FIX}")
    files = dict.fromkeys(PART_TYPES, path)
    if "session" not in info:
        files["session"] = folder.session_json
        info["session"] = read_json(folder.session_json)
    for name, types in PART_TYPES.items():
        if info.get(name) not in (None, {}):
            require_fields(path, info, {name: dict})
            require_fields(files[name], info[name], types)
    return info


def _values_by_name(rows: pandas.DataFrame, several_hosts: bool) -> dict[str, Any]:
    """Return the values of one rank by name, from its rows."""
    import pandas

    spans, memory, comm, scalars = (
        rows[rows["kind"] == kind] for kind in ("span", "memory", "comm", "scalar")
    )
    median_us = _drop_warmup(spans).groupby("name")["dur_us"].median()
    # The warm-up counts too: a peak is a peak.
    most_bytes = memory.groupby("name")["bytes"].max()
    comm = comm.assign(
        wire_bytes=_wire_bytes_column(comm),
        name=list(map(records.collective_label, comm["axis"], comm["name"])),
    )
    if several_hosts:
        # Calls across hosts are counted once more under another name, others as no calls.
        crosses = comm["hosts"].gt(1).fillna(False).astype(int)
        between = comm.assign(
            name=[f"{name}_between_hosts" for name in comm["name"]],
            count=comm["count"] * crosses,
            bytes=comm["bytes"] * crosses,
            wire_bytes=None,
        )
        comm = pandas.concat([comm, between])
    by_step = _drop_warmup(comm).groupby(["name", "step"])[["count", "bytes", "wire_bytes"]]
    largest = by_step.sum(min_count=1).groupby("name").max().stack().dropna()
    last = scalars.sort_values("step", kind="stable").groupby("name")["value"].last()
    return {
        **{f"{name}_ms": float(value) / 1000 for name, value in median_us.items()},
        **{f"{name}_bytes": int(value) for name, value in most_bytes.items()},
        **{f"{name}_{field}": _as_int_if_whole(value) for (name, field), value in largest.items()},
        **{str(name): float(value) for name, value in last.items()},
    }


# Bytes and counts are floats where a column also has gaps, and are shown as whole numbers.
def _as_int_if_whole(value: float) -> float:
    return int(value) if int(value) == value else float(value)


# None where the record of an older run lacks the number of ranks.
def _wire_bytes_column(comm: pandas.DataFrame) -> list[float | None]:
    known = comm["group_size"].gt(0).fillna(False) & comm["name"].isin(WIRE_FRACTIONS)
    given = zip(known, comm["name"], comm["bytes"], comm["group_size"], strict=True)
    return [
        collective_wire_bytes(name, size, ranks) if known else None
        for known, name, size, ranks in given
    ]


# A name that was measured in the warm-up alone, such as setup, keeps these rows.
def _drop_warmup(rows: pandas.DataFrame) -> pandas.DataFrame:
    settled = rows["step"] >= 0
    return rows[settled | ~rows["name"].isin(rows.loc[settled, "name"])]
