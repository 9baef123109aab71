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
from labkit.theory.collectives import AlphaBeta, ring_s

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
    hardware: str = ""
    slower: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "hardware" or (value is None and field.default is None):
                continue
            may_be_zero = field.name.endswith(("_us", "_ms"))
            least = "of at least 0" if may_be_zero else "above 0"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or (not value and not may_be_zero):
                raise ParameterError(f"{field.name} = {value!r} is not a number {least}")
        if self.ranks_per_host and self.ranks_per_host % 1:
            raise ParameterError(f"ranks_per_host = {self.ranks_per_host!r} is not a whole number")

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
        """Return the seconds of a collective or message, see ``collectives.ring_s``.

        Args:
            collective: such as "all_reduce", see ``collectives.WIRE_FRACTIONS``.
            handed_bytes: size of a rank's input tensor.
            ranks: number of ranks in the group.
            hosts: number of hosts over which they are spread evenly.
        """
        cards = max(1, ranks // hosts)
        card = AlphaBeta(self.between.alpha_s, self.between.beta_s_per_byte / cards)
        if collective in ("send", "recv"):
            link = self.between if hosts > 1 else self.inside
            return link.seconds(handed_bytes)
        # The root's link carries a part for each of the others.
        name = "all_gather" if collective in ("gather", "scatter") else collective
        return ring_s(name, handed_bytes, ranks, inside=self.inside, between=card, hosts=hosts)

    def describe(self) -> str:
        """Return the words under a figure, such as "emulated: 100 µs and 0.3 GB/s"."""
        if self.hardware:
            pace = f", 1 s = {1e3 / self.slower:g} ms" if self.slower != 1 else ""
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
    return f"{latency_us:g} µs and {f'{gb_per_s:g} GB/s' if gb_per_s else 'no limit'}"


def read_emulated(fields: dict[str, Any] | None) -> Emulated | None:
    """Return what the run.json of an emulated run describes, None of any other."""
    return Emulated(**fields) if fields else None
