"""Describe hardware that real ranks emulate: they wait as long as its links and devices would take.

    Emulated(latency_us=100, gb_per_s=0.3, forward_ms=5)

Ranks compute and send real numbers. Beyond that, a message is held back for the time of a ring on
these links, and a unit of the model for the time of its arithmetic. Waiting needs no core, so eight
ranks on two cores behave like eight devices.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import ParameterError
from labkit.theory.collectives import AlphaBeta
from labkit.theory.links import MEASURED_LINKS, Links

GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Emulated:
    """Links and devices whose times real ranks wait for.

    Attributes:
        latency_us: of one step of a ring on a host, in microseconds.
        gb_per_s: bandwidth of a rank's link on a host, in one direction; None for no limit.
        ranks_per_host: ranks that share a host; by default all of them.
        between_latency_us: of one step of a ring between hosts; by default ``latency_us``.
        between_gb_per_s: bandwidth of a rank's network card; by default ``gb_per_s``. A group uses
            the cards of all its ranks.
        forward_ms: time of a unit's forward pass, where one device does all of it.
        backward_ms: time of a unit's backward pass; by default twice ``forward_ms``.
        memory_gb_per_s: bandwidth of a device's memory, for what an all-gather extension encodes
            and decodes; None for no limit.
        unit_bytes: bytes of a full-size unit's parameters; messages take the time that they would
            take if the program's units were of this size. By default they have their own.
        links: name of hosts in ``theory.links.MEASURED_LINKS``, whose measured links take the place
            of the latencies and bandwidths above, which then only describe them.
        hardware: description of what is emulated, for figures.
        slower: factor by which all times above are longer than the hardware's.
    """

    latency_us: float = 0.0
    gb_per_s: float | None = None
    ranks_per_host: int | None = None
    between_latency_us: float | None = None
    between_gb_per_s: float | None = None
    forward_ms: float = 0.0
    backward_ms: float | None = None
    memory_gb_per_s: float | None = None
    unit_bytes: float | None = None
    links: str = ""
    hardware: str = ""
    slower: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("hardware", "links") or (value is None and field.default is None):
                continue
            may_be_zero = field.name.endswith(("_us", "_ms"))
            least = "of at least 0" if may_be_zero else "above 0"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or (not value and not may_be_zero):
                raise ParameterError(f"{field.name} = {value!r} is not a number {least}")
        if self.ranks_per_host and self.ranks_per_host % 1:
            raise ParameterError(f"ranks_per_host = {self.ranks_per_host!r} is not a whole number")
        if self.links and self.links not in MEASURED_LINKS:
            known = ", ".join(MEASURED_LINKS)
            raise ParameterError(f"links = {self.links!r} is none of {known}")

    @property
    def inside(self) -> AlphaBeta:
        """The link between ranks of a host."""
        return _link(self.latency_us, self.gb_per_s)

    @property
    def between(self) -> AlphaBeta:
        """The link of a rank's network card."""
        latency_us = self.between_latency_us
        latency_us = self.latency_us if latency_us is None else latency_us
        return _link(latency_us, self.between_gb_per_s or self.gb_per_s)

    @property
    def unit_backward_ms(self) -> float:
        """Time of a unit's backward pass."""
        return 2 * self.forward_ms if self.backward_ms is None else self.backward_ms

    def count_hosts(self, ranks: Sequence[int]) -> int:
        """Return the number of hosts over which these ranks are spread."""
        return len({rank // self.ranks_per_host for rank in ranks}) if self.ranks_per_host else 1

    def collective_s(
        self, collective: str, handed_bytes: float, ranks: int, *, hosts: int = 1
    ) -> float:
        """Return the seconds of a collective or message, see ``theory.links``.

        Args:
            collective: such as "all_reduce", see ``collectives.WIRE_FRACTIONS``.
            handed_bytes: size of a rank's input tensor.
            ranks: number of ranks in the group.
            hosts: number of hosts over which they are spread evenly.
        """
        # The root's link carries a part for each of the others.
        name = "all_gather" if collective in ("gather", "scatter") else collective
        if self.links:
            measured = MEASURED_LINKS[self.links]
            return self.slower * measured.collective_s(name, handed_bytes, ranks, hosts)
        # A card for each rank, and a ring as in a text book.
        devices = max(1, ranks // hosts)
        links = Links(self.inside, self.between, devices, devices)
        return links.collective_s(name, handed_bytes, ranks, hosts, "ring")

    def describe(self) -> str:
        """Return the words under a figure, such as "emulated: 100 µs and 0.3 GB/s"."""
        if self.hardware:
            pace_us = 1e6 / self.slower
            pace = f"{pace_us / 1e3:g} ms" if pace_us >= 1e3 else f"{pace_us:g} µs"
            pace = f", 1 s = {pace}" if self.slower != 1 else ""
            return f"emulated: {self.hardware}{pace}"
        text = f"emulated: {_describe_link(self.latency_us, self.gb_per_s)}"
        if self.ranks_per_host:
            between_us = round(self.between.alpha_s / MICRO, 3)
            outside = _describe_link(between_us, self.between_gb_per_s or self.gb_per_s)
            text += f" on hosts of {self.ranks_per_host}, {outside} between them"
        if self.forward_ms or self.unit_backward_ms:
            text += f", units of {self.forward_ms:g} + {self.unit_backward_ms:g} ms"
        return text


def _link(latency_us: float, gb_per_s: float | None) -> AlphaBeta:
    return AlphaBeta(latency_us * MICRO, 1 / (gb_per_s * GIGA) if gb_per_s else 0.0)


def _describe_link(latency_us: float, gb_per_s: float | None) -> str:
    if not gb_per_s:
        return f"{latency_us:g} µs and no limit"
    speed = f"{gb_per_s:.3g} GB/s" if gb_per_s >= 0.1 else f"{1e3 * gb_per_s:.3g} MB/s"
    return f"{latency_us:g} µs and {speed}"


def slow_motion_factor(step_s: float) -> float:
    """Return how often slower a step takes 0.4 to 1 s, with 1 s standing for a round time."""
    power = math.floor(math.log10(step_s))
    return next(
        1 / (digit * 10.0**power) for digit in (1, 2, 5, 10) if digit * 10.0**power >= step_s
    )


def read_emulated(fields: dict[str, Any] | None) -> Emulated | None:
    """Return what the run.json of an emulated run describes, None of any other."""
    return Emulated(**fields) if fields else None
