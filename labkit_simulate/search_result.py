"""The result of a search: every candidate with its memory and step time, the best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, ParameterError
from labkit.runs.folder import (
    FULL_DISK_FIX,
    explain_write_errors,
    read_json,
    require_fields,
    write_json,
)
from labkit.runs.result import RunResult, load
from labkit.theory.sizes import readable_bytes
from labkit_simulate.memory_fit import GIB, memory_fit_from_bytes

if TYPE_CHECKING:
    import pandas

RESULT_FILE = "plan.json"
RESULT_VERSION = 1
RESULT_FIELD_TYPES = {"version": int, "program": str, "varied": list, "candidates": list}
MAX_ROWS_SHOWN = 12
# The columns of a representation: its heading, and how a value is written.
COLUMN_FORMATS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "candidate": ("candidate", str),
    "hardware": ("hardware", str),
    "world_size": ("ranks", str),
    "batch": ("batch", str),
    "step_s": ("step, s", "{:.3g}".format),
    "step_low_s": ("at least", "{:.3g}".format),
    "step_high_s": ("at most", "{:.3g}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.0%}".format),
    "exposed_s": ("exposed, s", "{:.3g}".format),
    "dollars_per_step": ("$ a step", "{:.3g}".format),
    "dollars_per_million_tokens": ("$ a million tokens", "{:.3g}".format),
    "margin_bytes": ("left over", partial(readable_bytes, base=1024)),
    "peak_in": ("peak in", str),
    "whole": ("simulated", {True: "whole", False: "continued"}.__getitem__),
    "note": ("note", lambda text: text if isinstance(text, str) else ""),
}
NOT_SIMULATED_YET = "not simulated yet"


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        world_size: number of ranks.
        params: parameters of the program.
        samples: of all ranks in a step; None if unknown.
        tokens: of a sample; None if unknown.
        reason: why there are no results; "" if there are.
        folder: of its simulation.
        sizes: bytes of a rank: "peak" of its tensors, "reserved" by the allocator, and "ahead", the
            ``MemoryFit.prefetch_bytes``.
        peak_in: phase and block of the model at the peak.
        times: estimates by name of the hardware.
        continued_from: block counts of the simulations it was extrapolated from; empty if it was
            simulated whole.
        blocks: number of equal blocks of the model; 0 if unknown.
        note: what casts doubt on extrapolated numbers.
    """

    world_size: int
    params: dict[str, Any]
    samples: int | None = None
    tokens: int | None = None
    reason: str = NOT_SIMULATED_YET
    folder: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    peak_in: str = ""
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    continued_from: list[int] = field(default_factory=list)
    blocks: int = 0
    note: str = ""


@dataclass(frozen=True, repr=False)
class SearchResult:
    """All candidates of a search.

    Attributes:
        program: the program that all candidates run.
        varied: parameters in which they differ, besides the number of ranks.
        candidates: in the order of the request.
        budget_gib: memory of a device that a rank may use; None for all of it.
        dollars_per_hour: price of a device; None omits dollars.
        folder: where it is stored; None if it is not.
    """

    program: str
    varied: Sequence[str]
    candidates: Sequence[Candidate]
    budget_gib: float | None = None
    dollars_per_hour: float | None = None
    folder: Path | None = None

    def with_limits(self, **changed: float | None) -> SearchResult:
        """Return the same candidates under another ``budget_gib`` or ``dollars_per_hour``."""
        return replace(self, **changed)  # type: ignore[arg-type]

    @property
    def hardware_names(self) -> list[str]:
        """The kinds of hosts with estimates, in the order of the request."""
        return list(dict.fromkeys(name for each in self.candidates for name in each.times))

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """All candidates, a row per kind of host: first those that fit, the fastest on top.

        Columns: ``candidate`` (its number), ``hardware``, ``world_size``, the varied parameters,
        ``batch``; ``fits``, ``needed_bytes`` of a device and its ``margin_bytes``,
        ``reserved_bytes``, ``peak_bytes``, ``peak_in``; ``step_s``, with
        ``step_low_s`` and ``step_high_s`` by held-out residuals, ``compute_s``, ``exposed_s``
        (communication not hidden by computation), ``mfu``, ``samples``, ``tokens_per_s`` of all
        ranks; ``device_s`` (device seconds of a step), ``dollars_per_step``,
        ``dollars_per_million_tokens``; ``whole``, False if the numbers are extrapolated, with a
        ``note``; ``reason`` for those that do not fit. Columns without any value are omitted.
        """
        import pandas

        rows = [
            row
            for number, candidate in enumerate(self.candidates)
            for row in self._candidate_rows(number, candidate)
        ]
        frame = pandas.DataFrame(rows)
        # dtype object keeps None as None and 8 as 8, not 8.0.
        for name in self.varied:
            frame[name] = pandas.Series([row[name] for row in rows], dtype=object)
        empty = [name for name in frame if name not in self.varied and frame[name].isna().all()]
        frame = frame.drop(columns=empty)
        order = [name for name in ("fits", "step_s", "margin_bytes") if name in frame]
        ascending = [name == "step_s" for name in order]
        return frame.sort_values(order, ascending=ascending, kind="stable", ignore_index=True)

    def _candidate_rows(self, number: int, candidate: Candidate) -> list[dict[str, Any]]:
        row = {
            "candidate": number,
            "hardware": "",
            "world_size": candidate.world_size,
            **{name: candidate.params.get(name) for name in self.varied},
            "batch": candidate.params.get("batch"),
            "whole": not candidate.continued_from,
            "note": candidate.note or None,
        }
        if candidate.reason:
            return [row | {"fits": False, "reason": candidate.reason}]
        return [
            row | {"hardware": name} | self._row_values(candidate, times)
            for name, times in candidate.times.items()
        ]

    def _row_values(self, candidate: Candidate, times: Mapping[str, float]) -> dict[str, Any]:
        sizes = candidate.sizes
        budget_gib = self.budget_gib or times["memory_bytes"] / GIB
        fit = memory_fit_from_bytes(sizes["reserved"], budget_gib, sizes.get("ahead", 0))
        step_s = times["step_s"]
        tokens = (candidate.samples or 0) * (candidate.tokens or 0) or None
        device_s = step_s * candidate.world_size
        dollars = None if self.dollars_per_hour is None else device_s / 3600 * self.dollars_per_hour
        reason = ""
        if not fit:
            missing = readable_bytes(-fit.margin_bytes, base=1024)
            estimated = ", estimated" if candidate.continued_from else ""
            reason = f"{missing} of memory are missing{estimated}"
        return {
            "fits": bool(fit),
            "step_s": step_s,
            "step_low_s": times.get("step_low_s"),
            "step_high_s": times.get("step_high_s"),
            "tokens_per_s": tokens and tokens / step_s,
            "mfu": times.get("mfu"),
            "exposed_s": times["exposed_s"],
            "dollars_per_step": dollars,
            "dollars_per_million_tokens": dollars and tokens and dollars / tokens * 1e6,
            "needed_bytes": fit.budget_bytes - fit.margin_bytes,
            "margin_bytes": fit.margin_bytes,
            "reserved_bytes": fit.allocator_bytes,
            "peak_bytes": sizes["peak"],
            "peak_in": candidate.peak_in,
            "compute_s": times["compute_s"],
            "device_s": device_s,
            "samples": candidate.samples,
            "reason": reason,
        }

    @property
    def fitting_rows(self) -> pandas.DataFrame:
        """The rows that fit, the fastest first."""
        return self.frame[self.frame["fits"]]

    @property
    def best(self) -> pandas.Series:
        """The row with the shortest step; raises LabError if nothing fits."""
        return self._row_with_least("step_s")

    @property
    def cheapest(self) -> pandas.Series:
        """The row with the fewest device seconds per step; raises LabError if nothing fits."""
        return self._row_with_least("device_s")

    @property
    def untold_rows(self) -> pandas.DataFrame:
        """The rows that fit and are not told apart from the fastest: their ranges overlap."""
        rows = self.fitting_rows
        if rows.empty or "step_low_s" not in rows:
            return rows.head(0)
        same = rows[rows["hardware"] == self.best["hardware"]].drop(self.best.name)
        return same[same["step_low_s"] <= self.best["step_high_s"]]

    def _row_with_least(self, column: str) -> pandas.Series:
        if self.fitting_rows.empty:
            raise LabError("\n".join(["nothing fits", *self._other_lines()]))
        return self.fitting_rows.loc[self.fitting_rows[column].idxmin()]

    def best_so_far_text(self) -> str:
        """Describe the best row in a few words, for progress."""
        if self.fitting_rows.empty:
            return "none fits so far"
        what = ", ".join(f"{name} {self.best[name]}" for name in self.varied)
        return f"best so far {self.best['step_s']:.3g} s ({what})"

    def __repr__(self) -> str:
        table = self._display_frame().to_string(index=False)
        return "\n".join([self._headline(), table, *self._other_lines()])

    def _repr_html_(self) -> str:
        others = "".join(f"<li>{escape(line)}</li>" for line in self._other_lines())
        table = self._display_frame().to_html(index=False)
        return f"<p>{escape(self._headline())}</p>{table}<ul>{others}</ul>"

    def _headline(self) -> str:
        limit = "the memory of a device" if self.budget_gib is None else f"{self.budget_gib:g} GiB"
        text = (
            f"plan of {self.program}: {len(self.fitting_rows)} of {len(self.frame)} fit in {limit};"
            " simulated, step times reckoned"
        )
        extrapolated = [each.continued_from for each in self.candidates if each.continued_from]
        if not extrapolated:
            return text
        known = sum(not each.reason for each in self.candidates)
        blocks = " and ".join(map(str, extrapolated[0]))
        return (
            f"{text}; {len(extrapolated)} of {known} continued from {blocks} blocks, reserved"
            " memory estimated"
        )

    def _display_frame(self) -> pandas.DataFrame:
        """Return the first rows that fit, as text, without columns that are equal in all rows."""
        rows = self.fitting_rows.head(MAX_ROWS_SHOWN)
        first, rest = list(COLUMN_FORMATS)[:3], list(COLUMN_FORMATS)[3:]
        shown = {}
        for name in [*first, *self.varied, *rest]:
            if name not in rows or (name not in self.varied and rows[name].isna().all()):
                continue
            if name in ("hardware", "world_size", "whole") and self.frame[name].nunique() == 1:
                continue
            label, write = COLUMN_FORMATS.get(name, (name, str))
            shown[label] = rows[name].map(write)
        return rows.assign(**shown)[list(shown)]

    def _other_lines(self) -> list[str]:
        """Say how many rows are not shown, and why."""
        lines = []
        if len(self.untold_rows):
            lines.append(
                f"the first is not told apart from {len(self.untold_rows)} others: their ranges"
                " (at least, at most) overlap"
            )
        if len(self.fitting_rows) > MAX_ROWS_SHOWN:
            more = len(self.fitting_rows) - MAX_ROWS_SHOWN
            lines.append(f"and {more} more that fit: see .frame")
        others = self.frame[~self.frame["fits"]]
        too_large = others.reindex(columns=["margin_bytes"]).dropna()
        if len(too_large):
            missing = -too_large["margin_bytes"]
            least = readable_bytes(missing.min(), base=1024)
            most = readable_bytes(missing.max(), base=1024)
            lines.append(f"{len(missing)} do not fit: {least} to {most} of memory are missing")
        doubt = [each.note for each in self.candidates if each.note and not each.continued_from]
        if doubt:
            lines.append(
                f"{len(doubt)} simulated whole are not as continued ({doubt[0]}): give whole=None"
                " for all"
            )
        reasons = others["reason"].drop(too_large.index)
        counts = reasons.map(lambda text: text.partition("\n")[0]).value_counts(sort=False)
        return lines + [f"{count} × {reason}" for reason, count in counts.items()]

    def load_simulation(self, candidate: int) -> RunResult:
        """Load the simulation of a candidate, by the number in its row.

        Raises:
            ParameterError: it was not simulated, or not whole; the message says why.
        """
        found = self.candidates[candidate]
        if found.folder:
            return load(found.folder)
        call = f"labkit.simulate({self.program!r}, **plan.simulate_arguments({candidate}))"
        blocks = f"its numbers are continued from {found.continued_from} blocks"
        why = found.reason or f"{blocks}, simulate it with {call}"
        raise ParameterError(f"candidate {candidate} has no simulation: {why}")

    def simulate_arguments(self, candidate: int) -> dict[str, Any]:
        """Return the arguments of ``labkit.simulate`` for a candidate, without the program."""
        found = self.candidates[candidate]
        return {"world_size": found.world_size, **found.params}

    def save(self) -> None:
        """Write it into its folder."""
        assert self.folder
        content = {"version": RESULT_VERSION} | asdict(self)
        del content["folder"]  # it may be moved
        with explain_write_errors(self.folder / RESULT_FILE, FULL_DISK_FIX):
            write_json(self.folder / RESULT_FILE, content)

    @classmethod
    def load(cls, folder: str | Path) -> SearchResult:
        """Read a search from its folder, also one that was interrupted.

        Raises:
            FileNotFoundError: the folder holds no search.
            RecordError: plan.json is damaged.
        """
        path = Path(folder).resolve() / RESULT_FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{path.parent} holds no {RESULT_FILE}: give the folder of a plan, see its .folder"
            )
        content = read_json(path)
        require_fields(path, content, RESULT_FIELD_TYPES)
        return cls(
            program=content["program"],
            varied=content["varied"],
            candidates=[Candidate(**each) for each in content["candidates"]],
            budget_gib=content.get("budget_gib"),
            dollars_per_hour=content.get("dollars_per_hour"),
            folder=path.parent,
        )
