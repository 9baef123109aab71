"""Show which links a simulated rank's messages cross, and what each costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.runs.result import RunResult
from labkit.theory.collectives import collective_wire_bytes
from labkit_simulate.estimate import ranks_on_each_host, read_events, resolve_hardware
from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.step_time import collective_s, make_group

if TYPE_CHECKING:
    import pandas

GROUP_COLUMNS = ["collective", "axis", "ranks", "hosts", "link"]


def link_traffic_table(
    result: RunResult, hosts: str | Hardware | None = None, rank: int | None = None
) -> pandas.DataFrame:
    """Return a table of a simulated rank's step: a row per kind of collective and mesh axis.

    ``link`` is the slowest link crossed, "inside a host" or "between hosts". ``handed_bytes`` are
    bytes of the tensors passed in, ``wire_bytes`` those that leave a rank in a ring algorithm, and
    ``between_hosts_bytes`` the part that leaves the host, averaged over ranks: in each step of a
    ring over h hosts, h of the n messages leave a host.

    Args:
        result: of ``labkit.simulate``.
        hosts: hardware or its name, for a column ``seconds`` of the messages one after another.
        rank: a simulated rank; by default the first.

    Raises:
        LabError: the rank was not simulated, or took no step.
        ParameterError: no such hardware, or ranks that do not fit on its hosts.
    """
    import pandas

    done, on_host = read_events(result, rank), min(result.world_size, result.info["ranks_per_host"])
    kind = None if hosts is None else resolve_hardware(hosts)
    machine = kind and kind.for_rank(ranks_on_each_host(result.world_size, on_host, kind))
    rows = []
    for call in done.collective_calls:
        group = make_group(done.groups[call["group"]], on_host)
        wire = collective_wire_bytes(call["call"], call["bytes"], group.ranks)
        crosses = group.hosts > 1
        row = dict(
            zip(GROUP_COLUMNS, (call["call"], call["axis"], group.ranks, group.hosts), strict=False)
        )
        row |= {
            "link": "between hosts" if crosses else "inside a host",
            "calls": 1,
            "handed_bytes": call["bytes"],
        }
        row |= {
            "wire_bytes": wire,
            "between_hosts_bytes": wire * min(1.0, group.hosts / group.ranks) * crosses,
        }
        row |= (
            {"seconds": collective_s(call["call"], call["bytes"], group, machine)}
            if machine
            else {}
        )
        rows.append(row)
    columns = [
        *GROUP_COLUMNS,
        "calls",
        "handed_bytes",
        "wire_bytes",
        "between_hosts_bytes",
        *(["seconds"] if machine else []),
    ]
    return (
        pandas.DataFrame(rows, columns=columns)
        .groupby(GROUP_COLUMNS, sort=False, as_index=False)
        .sum()
    )
