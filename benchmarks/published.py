"""How far off is an estimated step from what others have published?

    python benchmarks/published.py

Rows are those of ``labkit_simulate.theory.reference_results``, each with its configuration; the first of each source
gave the share of the peak that matrix products reach, the others are predicted. Nothing runs. Every row is estimated
again with a planted wrong network, four times slower: rows that see the network must then be off. One figure, the
share of the peak, and two, with what a product costs beside its arithmetic, are fitted to vTrain's rows on up to two
ranks of tensor parallelism, and predict its others and nanotron's. Prints a table, and last one JSON object: the share
of rows within 1.25 x, of the planted ones, and the largest factor of memory.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, median

from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.reference_results import (
    A100_RESULTS,
    GIB,
    H100_RESULTS,
    IBM_RESULTS,
    NANOTRON_RESULTS,
    TORCHTITAN_TENSOR_RESULTS,
    VTRAIN_RESULTS,
    ReplicatedResult,
)

LIMIT, PLANTED = 1.25, 4
SEES_NETWORK = 0.05
"""A row sees the network if it waits for collectives for this share of its step or longer."""


def slower_network(hosts: Hardware) -> Hardware:
    """Return hosts whose links are ``PLANTED`` times slower."""
    return hosts.with_links(hosts.links.slower(PLANTED))


def predicted_rows() -> Iterator[tuple[str, int, float, float, float, bool]]:
    """Yield name, ranks, estimated and planted over published seconds, waiting share, and whether it is a fit."""
    sources = {"torchtitan": (*H100_RESULTS, *A100_RESULTS), "IBM": IBM_RESULTS}
    for source, row in ((source, row) for source, rows in sources.items() for row in rows):
        published_s = row.training.tokens / row.tokens_per_s
        time = row.estimate_step().time
        wrong = row.training.estimate_step(slower_network(row.hardware)).time
        name = f"{source} {row.name}, {row.training.checkpointing}"
        ratios = time.step_s / published_s, wrong.step_s / published_s
        fitted = row in (H100_RESULTS[0], A100_RESULTS[0])
        yield name, row.training.ranks, *ratios, time.exposed_s / time.step_s, fitted
    for each in (*VTRAIN_RESULTS, *NANOTRON_RESULTS, *TORCHTITAN_TENSOR_RESULTS):
        step, slow = (each.setup.estimate_step(hosts) for hosts in (each.hosts, slower_network(each.hosts)))
        name = f"{each.name}, DP {each.setup.data} x TP {each.setup.tensor}"
        over = step.step_s / each.step_s, slow.step_s / each.step_s
        yield name, each.setup.ranks, *over, step.exposed_s / step.step_s, each is VTRAIN_RESULTS[0]


def is_within(ratio: float) -> bool:
    """Tell whether an estimate is within ``LIMIT`` of what was published."""
    return 1 / LIMIT <= ratio <= LIMIT


def predicted(row: ReplicatedResult, share: float | None, product_s: float) -> float:
    """Return estimated over published seconds with this share of the peak, or its own, and cost of a product."""
    hosts = row.hosts if share is None else replace(row.hosts, matmul_share=share)
    return replace(row.setup, product_s=product_s).estimate_step(hosts).step_s / row.step_s


def errors(rows: Sequence[ReplicatedResult], share: float | None, product_s: float) -> list[float]:
    """Return the logarithm of each factor by which a row is missed."""
    return [abs(math.log(predicted(row, share, product_s))) for row in rows]


def fit_figures(rows: Sequence[ReplicatedResult], costs_us: Sequence[int]) -> tuple[float, float]:
    """Return the share of the peak, and the seconds of a product beside its arithmetic, that fit best."""
    grid = itertools.product((share / 200 for share in range(70, 111)), (us / 1e6 for us in costs_us))
    return min(grid, key=lambda figures: sum(errors(rows, *figures)))


def compare_one_with_two() -> dict[str, int]:
    """Print how well the share alone, and the share and a product's cost, predict rows that neither has seen."""
    seen = [row for row in VTRAIN_RESULTS if row.setup.tensor <= 2]
    unseen = [row for row in VTRAIN_RESULTS if row.setup.tensor > 2]
    within: dict[str, int] = {}
    for name, costs_us in (("one", (0,)), ("two", range(0, 121, 4))):
        share, product_s = fit_figures(seen, costs_us)
        print(f"{name}: share {share:.3f}, {1e6 * product_s:.0f} us a product, fitted to {len(seen)} of vTrain's rows")
        for rows, own in ((unseen, share), (NANOTRON_RESULTS, None)):
            found = errors(rows, own, product_s)
            met = sum(error <= math.log(LIMIT) for error in found)
            print(f"  {met} of {len(rows)} within {LIMIT} x, median {median(found):.3f}, mean {mean(found):.3f}")
            within[name] = within.get(name, 0) + met
    return within


def main() -> None:
    print(f"{'row':<52} {'GPUs':>4} {'step':>6} {'waits':>6} {'planted':>7}   (step: estimated / published)")
    met, caught = [], []
    for name, ranks, ratio, planted, waits, fitted in predicted_rows():
        note = "fitted" if fitted else "" if is_within(ratio) else "missed"
        print(f"{name:<52} {ranks:>4} {ratio:>6.2f} {waits:>6.0%} {planted:>7.2f} {note}")
        if not fitted:
            met.append(is_within(ratio))
            if waits >= SEES_NETWORK:
                caught.append(not is_within(planted))
    shares = [row.estimate_step().memory_bytes / GIB / row.memory_gib for row in H100_RESULTS if row.memory_gib]
    memory = max(max(share, 1 / share) for share in shares)
    share, planted_share = sum(met) / len(met), sum(caught) / len(caught)
    print(f"within {LIMIT} x: {sum(met)} of {len(met)}")
    print(f"planted, {PLANTED} x slower network: {sum(caught)} of {len(caught)} that see the network are off")
    result = {"within": round(share, 3), "planted_off": round(planted_share, 3), "memory_factor": round(memory, 3)}
    figures = compare_one_with_two()
    ok = share >= 0.8 and planted_share >= 0.5 and figures["two"] > figures["one"]
    print(json.dumps({"bench": "published", "held_out": len(met), "see_network": len(caught), **result, "ok": ok}))


if __name__ == "__main__":
    main()
