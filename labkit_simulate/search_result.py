"""What came of a search: each way to train, with what it holds and takes, as a table in which the
best is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, ParameterError
from labkit.runs.folder import read_json, require_fields, write_json
from labkit.runs.result import RunResult, load
from labkit.theory.sizes import readable_bytes
from labkit_simulate.memory_fit import GIB, memory_fit_from_bytes

if TYPE_CHECKING:
    import pandas

RESULT_FILE = "plan.json"
RESULT_VERSION = 1
RESULT_FIELD_TYPES = {"version": int, "program": str, "varied": list, "candidates": list}
MAX_ROWS_SHOWN = 12
"""Rows of those that fit that a representation shows."""
COLUMN_FORMATS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "candidate": ("candidate", str),
    "hardware": ("hardware", str),
    "world_size": ("ranks", str),
    "batch": ("batch", str),
    "step_s": ("step, s", "{:.3g}".format),
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
"""What a representation shows beside what varies: column, its name there, how a number is
written.
"""
NOT_SIMULATED_YET = "not simulated yet"


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        world_size: ranks.
        params: of the program.
        samples: of all ranks in a step; None where that is not known.
        tokens: of a sample; None where that is not known.
        reason: why there are no numbers; "" where there are.
        folder: of its simulation.
        sizes: bytes of a rank: "peak", of its tensors, "reserved", of a GPU for them, and "ahead",
            see ``memory_fit.MemoryFit``.
        peak_in: the phase and the block of the model that were at work when most was held.
        times: by the name of the hardware, what was reckoned for it.
        continued_from: the numbers of blocks of the simulations that its numbers continue, and
            "reserved" is estimated from; none where it was simulated whole. See ``continued``.
        blocks: equal blocks of the model; 0 where that is not known.
        note: what speaks against numbers that are, or were, continued.
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
        program: that they all train.
        varied: the parameters in which they differ, beside the number of ranks.
        candidates: in the order in which they were asked for.
        budget_gib: what a rank may take of its device; None for all that the device has.
        dollars_per_hour: what a device costs in an hour; None leaves dollars out.
        folder: where it lies; None where it was not kept.
    """

    program: str
    varied: Sequence[str]
    candidates: Sequence[Candidate]
    budget_gib: float | None = None
    dollars_per_hour: float | None = None
    folder: Path | None = None

    def with_limits(self, **changed: float | None) -> SearchResult:
        """The same candidates under another ``budget_gib`` or ``dollars_per_hour``; nothing is
        simulated.
        """
        return replace(self, **changed)  # type: ignore[arg-type]

    @property
    def hardware_names(self) -> list[str]:
        """The kinds of hosts that were reckoned, in the order in which they were asked for."""
        return list(
            dict.fromkeys(name for candidate in self.candidates for name in candidate.times)
        )

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """All candidates, a row for each kind of host: those that fit, the fastest first, then the
        others.

        Columns: ``candidate`` (its number), ``hardware``, ``world_size``, what varies, ``batch``;
        ``fits``, ``needed_bytes`` of a device and ``margin_bytes`` that it has left,
        ``reserved_bytes``, ``peak_bytes``; ``step_s``, ``compute_s``, ``exposed_s`` (communication
        that nothing hides), ``mfu``, ``samples``, ``tokens_per_s`` (of all ranks); ``device_s`` (a
        step's, of all devices), ``dollars_per_step``, ``dollars_per_million_tokens``; ``whole``,
        False where numbers are continued and ``reserved_bytes`` is estimated, and a ``note`` on
        that; ``reason``, for those that do not fit. A column is left out where nothing is known of
        it.
        """
        import pandas

        rows = [
            row
            for number, each in enumerate(self.candidates)
            for row in self._candidate_rows(number, each)
        ]
        frame = pandas.DataFrame(rows)
        # dtype object keeps None as None and 8 as 8, not 8.0.
        for name in self.varied:
            frame[name] = pandas.Series([row[name] for row in rows], dtype=object)
        frame = frame.drop(
            columns=[name for name in frame if name not in self.varied and frame[name].isna().all()]
        )
        order = [name for name in ("fits", "step_s", "margin_bytes") if name in frame]
        ascending = [name == "step_s" for name in order]
        return frame.sort_values(order, ascending=ascending, kind="stable", ignore_index=True)

    def _candidate_rows(self, number: int, candidate: Candidate) -> list[dict[str, Any]]:
        varied = {name: candidate.params.get(name) for name in self.varied}
        named = {"candidate": number, "hardware": "", "world_size": candidate.world_size} | varied
        named |= {"batch": candidate.params.get("batch")}
        named |= {"whole": not candidate.continued_from, "note": candidate.note or None}
        if candidate.reason:
            return [named | {"fits": False, "reason": candidate.reason}]
        return [
            named | {"hardware": name} | self._row_values(candidate, times)
            for name, times in candidate.times.items()
        ]

    def _row_values(self, candidate: Candidate, times: Mapping[str, float]) -> dict[str, Any]:
        """What a row says of a candidate that was simulated."""
        sizes = candidate.sizes
        held = memory_fit_from_bytes(
            sizes["reserved"], self.budget_gib or times["memory_bytes"] / GIB, sizes.get("ahead", 0)
        )
        step_s = times["step_s"]
        tokens = (
            math.prod((candidate.samples, candidate.tokens))
            if candidate.samples and candidate.tokens
            else None
        )
        device_s = step_s * candidate.world_size
        estimated = ", estimated" if candidate.continued_from else ""
        dollars = None if self.dollars_per_hour is None else device_s / 3600 * self.dollars_per_hour
        return {
            "fits": bool(held),
            "step_s": step_s,
            "tokens_per_s": tokens and tokens / step_s,
            "mfu": times.get("mfu"),
            "exposed_s": times["exposed_s"],
            "dollars_per_step": dollars,
            "dollars_per_million_tokens": dollars and tokens and dollars / tokens * 1e6,
            "needed_bytes": held.budget_bytes - held.margin_bytes,
            "margin_bytes": held.margin_bytes,
            "reserved_bytes": held.allocator_bytes,
            "peak_bytes": sizes["peak"],
            "peak_in": candidate.peak_in,
            "compute_s": times["compute_s"],
            "device_s": device_s,
            "samples": candidate.samples,
            "reason": (
                ""
                if held
                else (
                    f"{readable_bytes(-held.margin_bytes, base=1024)} of memory are"
                    f" missing{estimated}"
                )
            ),
        }

    @property
    def fitting_rows(self) -> pandas.DataFrame:
        """The rows of those that fit, the fastest first."""
        return self.frame[self.frame["fits"]]

    @property
    def best(self) -> pandas.Series:
        """The row of the one whose step is shortest.

        Raises:
            LabError: nothing fits; the message says how much is missing.
        """
        return self._row_with_least("step_s")

    @property
    def cheapest(self) -> pandas.Series:
        """The row of the one whose step takes least time of all devices together, and so costs
        least.

        Raises:
            LabError: nothing fits; the message says how much is missing.
        """
        return self._row_with_least("device_s")

    def _row_with_least(self, column: str) -> pandas.Series:
        if self.fitting_rows.empty:
            raise LabError("\n".join(["nothing fits", *self._other_lines()]))
        return self.fitting_rows.loc[self.fitting_rows[column].idxmin()]

    def best_so_far_text(self) -> str:
        """The best in a few words, for progress."""
        if self.fitting_rows.empty:
            return "none fits so far"
        what = ", ".join(f"{name} {self.best[name]}" for name in self.varied)
        return f"best so far {self.best['step_s']:.3g} s ({what})"

    def __repr__(self) -> str:
        return "\n".join(
            [self._headline(), self._display_frame().to_string(index=False), *self._other_lines()]
        )

    def _repr_html_(self) -> str:
        others = "".join(f"<li>{escape(line)}</li>" for line in self._other_lines())
        table = self._display_frame().to_html(index=False)
        return f"<p>{escape(self._headline())}</p>{table}<ul>{others}</ul>"

    def _headline(self) -> str:
        limit = "the memory of a device" if self.budget_gib is None else f"{self.budget_gib:g} GiB"
        fits = f"{len(self.fitting_rows)} of {len(self.frame)} fit in {limit}"
        return (
            f"plan of {self.program}: {fits}; simulated, step times"
            f" reckoned{self._extrapolation_text()}"
        )

    def _extrapolation_text(self) -> str:
        """How many were not simulated whole."""
        few = [each.continued_from for each in self.candidates if each.continued_from]
        if not few:
            return ""
        known = sum(not each.reason for each in self.candidates)
        blocks = " and ".join(map(str, few[0]))
        return f"; {len(few)} of {known} continued from {blocks} blocks, reserved memory estimated"

    def _display_frame(self) -> pandas.DataFrame:
        """The first of those that fit, as text; what is the same in all rows is left out."""
        rows = self.fitting_rows.head(MAX_ROWS_SHOWN)
        said_once = ("hardware", "world_size", "whole")
        same = [name for name in said_once if name in rows and self.frame[name].nunique() == 1]
        shown = {}
        for name in [*list(COLUMN_FORMATS)[:3], *self.varied, *list(COLUMN_FORMATS)[3:]]:
            label, written = COLUMN_FORMATS.get(name, (name, str))
            if (
                name in rows
                and name not in same
                and (name in self.varied or rows[name].notna().any())
            ):
                shown[label] = rows[name].map(written)
        return rows.assign(**shown)[list(shown)]

    def _other_lines(self) -> list[str]:
        """How many are not shown, and why."""
        others = self.frame[~self.frame["fits"]]
        missing = (
            -others["margin_bytes"].dropna()
            if "margin_bytes" in others
            else others["reason"].head(0)
        )
        lines = (
            [f"and {len(self.fitting_rows) - MAX_ROWS_SHOWN} more that fit: see .frame"]
            if len(self.fitting_rows) > MAX_ROWS_SHOWN
            else []
        )
        if len(missing):
            least, most = (
                readable_bytes(each, base=1024) for each in (missing.min(), missing.max())
            )
            lines.append(f"{len(missing)} do not fit: {least} to {most} of memory are missing")
        doubt = [each.note for each in self.candidates if each.note and not each.continued_from]
        if doubt:
            lines.append(
                f"{len(doubt)} simulated whole are not as continued ({doubt[0]}): give whole=None"
                " for all"
            )
        said = others.loc[others.index.difference(missing.index), "reason"].map(
            lambda text: text.partition("\n")[0]
        )
        return lines + [
            f"{count} × {reason}" for reason, count in said.value_counts(sort=False).items()
        ]

    def load_simulation(self, candidate: int) -> RunResult:
        """The simulation of a candidate, by the number in its row.

        Raises:
            ParameterError: it was not simulated, or not whole; the message says why.
        """
        found = self.candidates[candidate]
        if not found.folder:
            fix = (
                f"simulate it with labkit.simulate({self.program!r}, **plan.arguments({candidate}))"
            )
            few = f"its numbers are continued from {found.continued_from} blocks, {fix}"
            raise ParameterError(f"candidate {candidate} has no simulation: {found.reason or few}")
        return load(found.folder)

    def simulate_arguments(self, candidate: int) -> dict[str, Any]:
        """What ``labkit.simulate`` takes to simulate a candidate again, beside the program's
        name.
        """
        found = self.candidates[candidate]
        return {"world_size": found.world_size, **found.params}

    def save(self) -> None:
        """Write it into its folder."""
        assert self.folder
        content = {"version": RESULT_VERSION} | asdict(self)
        del content["folder"]  # it may be moved
        write_json(self.folder / RESULT_FILE, content)

    @classmethod
    def load(cls, folder: str | Path) -> SearchResult:
        """Read a plan from its folder, also one that was interrupted.

        Raises:
            FileNotFoundError: the folder holds no plan.
            RecordError: plan.json is damaged.
        """
        path = Path(folder).resolve() / RESULT_FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{path.parent} holds no {RESULT_FILE}: give the folder of a plan, see its .folder"
            )
        content = read_json(path)
        require_fields(path, content, RESULT_FIELD_TYPES)
        candidates = [Candidate(**each) for each in content["candidates"]]
        how = {name: content.get(name) for name in ("budget_gib", "dollars_per_hour")}
        return cls(content["program"], content["varied"], candidates, **how, folder=path.parent)
