"""How far off is a collective, estimated, from what others have measured?

    python benchmarks/network.py [--figure results/network.png]

For each kind of hosts, figures of ``theory.links`` are fitted to some of the measured all-reduces of
``benchmarks/data`` and predict the rest: other numbers of ranks and every second size. B200 hosts are also
fitted on one host alone, and predict four. A planted network, four times slower, must be seen to be wrong.
Prints residuals by size, ranks and hosts, and last one JSON object; ``--figure`` draws them.
"""

import argparse
import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from labkit.theory.collectives import AlphaBeta
from labkit.theory.links import DATA_SHEETS, MEASURED_LINKS, NCCL_NETWORK_STEP_US, Links

DATA = Path(__file__).parent / "data"
MIB = 2**20
WARM_UP_BYTES = 2**17
"""The published table's first size over four hosts took 6.3 ms, 11 times as long as the next: its warm-up."""
SIZES = {"to 16 MiB": 2**24, "to 256 MiB": 2**28, "above": math.inf}
PLANTED = 4
FITTED = {
    "a100-8x": ("call", "step", "share", "copy", "ramp"),
    "v100-8x": ("call", "step", "share", "copy", "ramp"),
    "b200-8x": ("call", "step", "share", "copy", "ramp", "nvls", "between step", "between share"),
}
"""What is fitted for each kind of hosts."""


@dataclass(frozen=True)
class Row:
    """A measured all-reduce."""

    ranks: int
    hosts: int
    size: int
    seconds: float


def read_rows(kind: str) -> list[Row]:
    """Return the measured all-reduces on a kind of hosts, such as "a100-8x"."""
    path = DATA / f"allreduce_{kind.partition('-')[0]}.csv"
    with path.open() as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    if "gpus" in lines[0]:
        return [Row(int(one["gpus"]), 1, int(one["bytes"]), 1e-6 * float(one["time_us"])) for one in lines]
    return [
        Row(8 * hosts, hosts, int(one["payload_bytes"]), 1e-6 * float(one[f"time_us_{hosts}node"]))
        for hosts in (1, 4)
        for one in lines
        if hosts == 1 or int(one["payload_bytes"]) >= WARM_UP_BYTES
    ]


def predict_s(links: Links, row: Row) -> float:
    """Return the estimated seconds of a measured all-reduce."""
    return links.collective_s("all_reduce", row.size, row.ranks, row.hosts)


def errors(links: Links, rows: Iterable[Row]) -> list[float]:
    """Return predicted over measured, less 1, of each row."""
    return [predict_s(links, row) / row.seconds - 1 for row in rows]


def neutral_links(kind: str) -> Links:
    """Return links with round figures: the data sheet's bandwidth, NCCL's latencies, no ramp to speak of."""
    known = MEASURED_LINKS[kind]
    nvlink, card = DATA_SHEETS[kind]
    nvls = 2e-12 if known.tuning.nvls_s_per_byte else None
    return replace(
        known,
        inside=AlphaBeta(3.4e-6, 1e-9 / nvlink),
        between=AlphaBeta(1e-6 * NCCL_NETWORK_STEP_US, 1e-9 / card),
        call_s=20e-6,
        tuning=replace(known.tuning, copy_s_per_byte=1e-12, ramp=0.02, nvls_s_per_byte=nvls),
    )


def fit_links(kind: str, rows: Sequence[Row]) -> Links:
    """Fit a kind of hosts to measured all-reduces by the least mean of |log(predicted / measured)|.

    The search knows none of the fitted figures: it starts at ``neutral_links`` and beside. Rows of one host say
    nothing of the network, which then stays NCCL's.
    """
    start, names = neutral_links(kind), FITTED[kind]
    if all(row.hosts == 1 for row in rows):
        names = tuple(name for name in names if not name.startswith("between"))

    def loss(logs: Sequence[float]) -> float:
        links = change_links(start, dict(zip(names, map(math.exp, logs), strict=True)))
        return sum(abs(math.log(predict_s(links, row) / row.seconds)) for row in rows) / len(rows)

    draw = random.Random(0)
    starts = [[draw.uniform(-1, 1) for _ in names] for _ in range(8)]
    found = min((minimize(loss, one) for one in starts), key=loss)
    return change_links(start, dict(zip(names, map(math.exp, found), strict=True)))


def change_links(links: Links, factors: dict[str, float]) -> Links:
    """Return links with figures multiplied by these factors; "share" means bandwidth."""

    def of(name: str) -> float:
        return factors.get(name, 1.0)

    tuning, inside, between = links.tuning, links.inside, links.between
    return replace(
        links,
        call_s=of("call") * links.call_s,
        inside=AlphaBeta(of("step") * inside.alpha_s, inside.beta_s_per_byte / of("share")),
        between=AlphaBeta(of("between step") * between.alpha_s, between.beta_s_per_byte / of("between share")),
        tuning=replace(
            tuning,
            copy_s_per_byte=of("copy") * tuning.copy_s_per_byte,
            ramp=of("ramp") * tuning.ramp,
            nvls_s_per_byte=tuning.nvls_s_per_byte and of("nvls") * tuning.nvls_s_per_byte,
        ),
    )


def minimize(loss: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 500) -> list[float]:
    """Return where the loss is least by the simplex of Nelder and Mead, 1965."""
    count = len(start)
    corners = [list(start)] + [[x + 0.3 * (i == j) for i, x in enumerate(start)] for j in range(count)]
    ranked = sorted((loss(corner), corner) for corner in corners)
    for _ in range(rounds):
        worst = ranked[-1][1]
        centre = [sum(corner[i] for _, corner in ranked[:-1]) / count for i in range(count)]

        def move(far: float, centre: list[float] = centre, worst: list[float] = worst) -> tuple[float, list[float]]:
            point = [c + far * (c - w) for c, w in zip(centre, worst, strict=True)]
            return loss(point), point

        tried = move(1.0)
        if tried[0] < ranked[0][0]:
            tried = min(tried, move(2.0))
        elif tried[0] >= ranked[-2][0]:
            tried = move(-0.5)
        if tried[0] < ranked[-1][0]:
            ranked = sorted([*ranked[:-1], tried])
            continue
        best = ranked[0][1]
        shrunk = [[(a + b) / 2 for a, b in zip(best, corner, strict=True)] for _, corner in ranked[1:]]
        ranked = sorted([ranked[0], *((loss(corner), corner) for corner in shrunk)])
    return ranked[0][1]


def splits(kind: str) -> dict[str, tuple[list[Row], list[Row]]]:
    """Return rows to fit and rows to predict, by what is held out."""
    rows = read_rows(kind)
    found = {"every second size": (rows[::2], rows[1::2])}
    if kind == "b200-8x":
        return found | {"4 hosts": ([row for row in rows if row.hosts == 1], [row for row in rows if row.hosts > 1])}
    return found | {"4 ranks": ([row for row in rows if row.ranks != 4], [row for row in rows if row.ranks == 4])}


def summary(found: Sequence[float]) -> dict[str, float]:
    """Return the median of the absolute errors, their 9th decile, and the share within 25 %."""
    sizes = sorted(map(abs, found))
    within = sum(size <= 0.25 for size in sizes) / len(sizes)
    decile = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return {"rows": len(sizes), "median": round(median(sizes), 4), "decile": round(decile, 4), "within_25": within}


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by hosts, ranks and size."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        size = next(name for name, most in SIZES.items() if row.size <= most)
        found.setdefault(f"{row.hosts} hosts, {row.ranks} ranks, {size}", []).append(row)
    return found


def draw_figure(drawn: dict[str, tuple[Links, list[Row], list[Row]]], path: Path) -> None:
    """Draw predicted over measured by size: fitted rows, held-out rows, and a planted wrong network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for ax, (kind, (links, fitted, held)) in zip(axes, drawn.items(), strict=True):
        ax.axhspan(0.8, 1.25, color="0.9", label="within 1.25 x")
        wrong = links.slower(PLANTED)
        for rows, by, mark, name in (
            (fitted, links, ".", "fitted"),
            (held, links, "o", "held out"),
            (held, wrong, "x", f"planted: {PLANTED} x slower"),
        ):
            ratios = [1 + error for error in errors(by, rows)]
            style = {"markerfacecolor": "none"} if mark == "o" else {}
            ax.plot([row.size / MIB for row in rows], ratios, mark, ms=4, label=name, **style)
        ax.set(xscale="log", yscale="log", title=kind, xlabel="tensor, MiB")
        ax.set_yticks([0.5, 0.8, 1, 1.25, 2, 4], ["0.5", "0.8", "1", "1.25", "2", "4"])
        ax.minorticks_off()
    figure.axes[0].set_ylabel("predicted / measured")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--constants", action="store_true", help="print the figures of theory.links, fitted to all rows"
    )
    asked = parser.parse_args()
    result, drawn = {}, {}
    for kind in FITTED:
        for what, (fitted, held) in splits(kind).items():
            links = fit_links(kind, fitted)
            found = summary(errors(links, held))
            result[f"{kind}, {what}"] = found
            print(f"{kind}: {what} held out, {len(fitted)} rows fitted, {len(held)} predicted")
            for name, rows in groups_of(held).items():
                part = summary(errors(links, rows))
                print(
                    f"  {name:<32} {part['rows']:>3} rows, median {part['median']:.1%}, 9th decile {part['decile']:.1%}"
                )
            if what == "every second size":
                drawn[kind] = (links, fitted, held)
                planted = summary(errors(links.slower(PLANTED), held))
                result[f"{kind}, planted"] = planted
                print(f"  planted, {PLANTED} x slower: {planted['within_25']:.0%} within 25 %")
        if asked.constants:
            print(fit_links(kind, read_rows(kind)))
    if asked.figure:
        draw_figure(drawn, asked.figure)
    good = [part for name, part in result.items() if name.endswith(("size", "4 ranks"))]
    ok = all(part["median"] <= 0.1 and part["within_25"] >= 0.9 for part in good)
    ok &= all(part["within_25"] < 0.1 for name, part in result.items() if name.endswith("planted"))
    print(json.dumps({"bench": "network", "held_out": result, "ok": ok}))


if __name__ == "__main__":
    main()
