"""Explore a finished search under other budgets, prices and hosts."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pandas
from matplotlib.figure import Figure

import labkit
from labkit.plots import style
from labkit.plots.runs import comparison_row
from labkit.runs.result import RunResult
from labkit.theory.sizes import readable_bytes
from labkit_course.widgets.explorer import Control, Explorer
from labkit_simulate import estimate, memory_fit
from labkit_simulate.plots import candidate_scatter

# Holds the default search, which benchmarks/plan.py makes.
DEFAULT_FOLDER = Path(__file__).with_name("plans")
BUDGETS_GIB = (16, 24, 40, 80, 140, 180)
GPU_HOUR_PRICES = {"not said": None, "1": 1.0, "2": 2.0, "3": 3.0, "5": 5.0, "8": 8.0}
PLACE_LABELS = ("1st", "2nd", "3rd", "4th", "5th", "6th")
CANDIDATE_LETTERS = "abcdef"
EXTRAPOLATION_NOTE = " (continued from fewer blocks, reserved memory estimated)"
PARETO_TITLE = "nothing is both faster and smaller than"


class CandidateExplorer(Explorer):
    """Show the candidates of a search, by default Llama 2 7B's; *run it* simulates one."""

    title = "Which way to train fits, and which is fast?"
    controls: ClassVar = {}
    formulas = (memory_fit.memory_fit, estimate.estimate_rank_step)
    run_tip = "simulate the chosen one once more; nothing is measured"
    size = (8.5, 4.2)

    def __init__(
        self, plan: labkit.SearchResult | None = None, *, budget_gib: int = 80, per: str = ""
    ):
        """Open a search.

        Args:
            plan: the search, by default the one that comes with labkit.
            budget_gib: one of ``BUDGETS_GIB``, with which the explorer opens.
            per: the field by which times are divided before they are compared, such as ``batch``
                where candidates train with different ones.
        """
        self.plan, self.per = plan or load_default_search(), per
        self.controls = search_controls(self.plan, budget_gib, per)  # type: ignore[misc]  # of this plan
        super().__init__()

    def candidate_rows(self, **chosen: Any) -> pandas.DataFrame:
        """Return the candidates of these hosts, ranked as chosen; ValueError if none fits."""
        frame = self.plan.with_limits(
            budget_gib=chosen["budget_gib"], dollars_per_hour=chosen["price"]
        ).frame
        rows = frame[
            (frame["hardware"] == chosen["hardware"]) & (frame["world_size"].isin(chosen["ranks"]))
        ]
        rows = rows.assign(compared_s=rows["step_s"] / (rows[self.per] if self.per else 1))
        rows = rows.sort_values(["fits", chosen["by"]], ascending=[False, True], kind="stable")
        if not rows["fits"].any():
            least = rows["needed_bytes"].min() / memory_fit.GIB
            raise ValueError(
                f"none fits in {chosen['budget_gib']} GiB: the least that is needed is"
                f" {least:.3g} GiB"
            )
        return rows

    def current_row(self, **chosen: Any) -> dict[str, Any]:
        """Return the chosen candidate; ValueError if fewer candidates fit."""
        fitting = self.candidate_rows(**chosen).query("fits")
        if chosen["place"] >= len(fitting):
            raise ValueError(f"only {len(fitting)} fit: take a lower place, or a larger budget")
        found: dict[str, Any] = fitting.iloc[chosen["place"]].to_dict()
        return found

    def predict(self, **chosen: Any) -> dict[str, float]:
        row = self.current_row(**chosen)
        return {
            "peak_total_bytes": row["peak_bytes"],
            "gpu_reserved_bytes": row["reserved_bytes"],
            "reckoned_step_s": row["step_s"],
            "reckoned_exposed_s": row["exposed_s"],
        }

    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        rows, row = self.candidate_rows(**chosen), self.current_row(**chosen)
        ax = figure.add_axes((0.09, 0.13, 0.6, 0.72))
        fitting = rows[rows["fits"]]
        named = pareto_front(fitting).to_dict("records")
        words = {
            each["candidate"]: letter
            for letter, each in zip(CANDIDATE_LETTERS, named, strict=False)
        }
        lines = [
            f"{words[each['candidate']]}  {self._candidate_text(each, chosen)}" for each in named
        ]
        figure.text(
            0.71, 0.82, "\n".join([PARETO_TITLE, *lines]), fontsize=8, va="top", linespacing=1.6
        )
        budget = chosen["budget_gib"] * memory_fit.GIB
        candidate_scatter(
            rows,
            budget,
            marks=self._marker_column(),
            small=self._size_column(),
            per=self.per,
            words=words,
            chosen=row["candidate"],
            ax=ax,
        )
        ax.set_xlim(
            right=1.05 * min(max(rows["needed_bytes"].max(), budget), 3 * budget) / memory_fit.GIB
        )
        cost = (
            f", {style.short_number_text(1e3 * row['dollars_per_step'])} dollars for 1,000 steps"
            if chosen["price"]
            else ""
        )
        return (
            f"{len(fitting)} of {len(rows)} fit in {chosen['budget_gib']} GiB; the"
            f" {PLACE_LABELS[chosen['place']]} ({self._candidate_text(row, chosen)}) takes"
            f" {style.duration_text(row['step_s'])} a step{cost}, with"
            f" {readable_bytes(row['margin_bytes'], base=1024)} left"
            f" over{'' if row['whole'] else EXTRAPOLATION_NOTE}"
        )

    def table_row(self, name: str, predicted: float, result: RunResult | None) -> dict[str, str]:
        again = result.value(name) if result else None
        row = comparison_row({"plan": predicted}, "simulated again", again, 0.0)
        # A repeated simulation can only repeat the plan, so it does not make the plan right.
        return {name: "the same" if text == "right" else text for name, text in row.items()}

    def launch(self, **chosen: Any) -> RunResult:
        row = self.current_row(**chosen)
        return labkit.simulate(
            self.plan.program,
            hardware=row["hardware"],
            **self.plan.simulate_arguments(row["candidate"]),
        )

    def _marker_column(self) -> str:
        return (
            "checkpointing"
            if "checkpointing" in self.plan.varied
            else next(iter(self.plan.varied), "world_size")
        )

    def _size_column(self) -> str:
        """Return the field that the size of a mark shows: the only other one, of two values."""
        others = [
            each for each in self.plan.varied if each not in (self._marker_column(), self.per)
        ]
        values = [{row.params[each] for row in self.plan.candidates} for each in others]
        return others[0] if [len(each) for each in values] == [2] else ""

    def _candidate_text(self, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
        """Describe a candidate by what varies."""
        several = [f"{row['world_size']} GPUs"] if len(chosen["ranks"]) > 1 else []
        varied = [
            f"{name} {row[name]}" for name in self.plan.varied if row[name] not in (None, False)
        ]
        return ", ".join([*several, *varied])


@cache
def load_default_search() -> labkit.SearchResult:
    """Load the search that comes with labkit."""
    return labkit.SearchResult.load(DEFAULT_FOLDER)


def search_controls(plan: labkit.SearchResult, budget_gib: int, per: str) -> dict[str, Control]:
    """Return the controls for a search; see ``CandidateExplorer``."""
    rows = plan.frame[plan.frame["step_s"].notna()]
    hosts, counts = plan.hardware_names, sorted({*rows["world_size"]})
    ranks = {str(count): (count,) for count in counts} | (
        {"all": tuple(counts)} if len(counts) > 1 else {}
    )
    orders = {f"time / {per}" if per else "time": "compared_s", "cost": "device_s"}
    return {
        "hardware": Control("hosts", hosts, hosts[0]),
        "ranks": Control("GPUs", ranks, tuple(counts)),
        "budget_gib": Control("budget of a GPU, GiB", BUDGETS_GIB, budget_gib),
        "price": Control("dollars for a GPU hour", GPU_HOUR_PRICES, None, only_drawn=True),
        "by": Control("ranked by", orders, "compared_s"),
        "place": Control(
            "chosen", dict(zip(PLACE_LABELS, range(len(PLACE_LABELS)), strict=True)), 0
        ),
    }


def pareto_front(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the first few rows that no other beats in both time and memory, the fastest first."""
    by_time = rows.sort_values(["compared_s", "needed_bytes"])
    # The least memory of all configurations that are faster.
    least = by_time["needed_bytes"].cummin().shift()
    return by_time[least.isna() | (by_time["needed_bytes"] < least)].head(len(CANDIDATE_LETTERS))
