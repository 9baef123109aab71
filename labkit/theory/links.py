"""Estimate collectives over links as measured: one formula for the simulator and the emulation.

    time = call + steps x latency + wire bytes / bandwidth reached + passes over the tensor

NCCL chooses an algorithm and a protocol for each call. Here each combination that it would
consider is estimated with the measured figures of the hosts, and the quickest is taken. The
figures of a kind of hosts are fitted to measured collectives by ``benchmarks/network.py``; the
ratios between protocols are the constants with which NCCL itself compares them.

Sources: NCCL's src/graph/tuning.cc, ``ncclTopoTuneModel`` of version 2.27 (algorithms, what counts
as a step, ratios of protocols); Patarasuk and Yuan, 2009 (ring); Sanders, Speck and Träff, 2009
(trees).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.theory.collectives import (
    WIRE_FRACTIONS,
    AlphaBeta,
    collective_wire_bytes,
    ring_step_count,
)

REFERENCE_BYTES = 2**30
"""Size of a tensor whose wire bytes reach the bandwidth of ``Links.inside``, see ``ramp``."""


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL, relative to Simple.

    Attributes:
        inside: latency of a step inside a host.
        between: latency of a step between hosts.
        bandwidth: share of the bandwidth that is payload.
    """

    inside: float
    between: float
    bandwidth: float


SIMPLE = Protocol(1.0, 1.0, 1.0)
LL = Protocol(inside=0.6 / 3.4, between=2.7 / 14, bandwidth=0.5)
LL128 = Protocol(inside=1.9 / 3.4, between=4 / 14, bandwidth=120 / 128)
NCCL_PROTOCOLS = (SIMPLE, LL, LL128)
"""Latencies of a ring and payload of a line: 4 of 8 bytes (LL), 120 of 128 (LL128)."""


@dataclass(frozen=True)
class Tuning:
    """What is known of a kind of host beyond latency and bandwidth.

    Attributes:
        protocols: those that NCCL considers.
        copy_s_per_byte: time of an all-reduce per byte of its tensor for reading, adding and
            writing it on the device; a gather or a reduce-scatter takes half of it.
        ramp: exponent with which the bandwidth inside a host grows with the size of the tensor.
        nvls_s_per_byte: time of an all-reduce on one full host per byte of its tensor if the switch
            adds (NVLS); None without such a switch.
        rings: rings over direct links, by number of ranks, for hosts without a switch; None if a
            switch gives any ranks the full bandwidth.
        network_measured: whether the links between hosts are more than a guess.
    """

    protocols: tuple[Protocol, ...] = (SIMPLE,)
    copy_s_per_byte: float = 0.0
    ramp: float = 0.0
    nvls_s_per_byte: float | None = None
    rings: Mapping[int, float] | None = field(default=None, hash=False)
    network_measured: bool = True


PLAIN = Tuning()
"""A ring with one protocol, as in a text book."""


@dataclass(frozen=True)
class Links:
    """The links of hosts.

    Attributes:
        inside: a step inside a host with the protocol Simple, and seconds per byte of a device.
        between: the same of one network card.
        devices: devices of a host.
        cards: network cards of a host, which its devices share evenly.
        call_s: time of any call.
        tuning: what else is known.
    """

    inside: AlphaBeta
    between: AlphaBeta
    devices: int
    cards: int
    call_s: float = 0.0
    tuning: Tuning = PLAIN

    def slower(self, factor: float) -> "Links":
        """Return links on which everything takes so many times as long."""
        inside, between, tuning = self.inside, self.between, self.tuning
        nvls = tuning.nvls_s_per_byte and factor * tuning.nvls_s_per_byte
        copy = factor * tuning.copy_s_per_byte
        return replace(
            self,
            inside=AlphaBeta(factor * inside.alpha_s, factor * inside.beta_s_per_byte),
            between=AlphaBeta(factor * between.alpha_s, factor * between.beta_s_per_byte),
            call_s=factor * self.call_s,
            tuning=replace(tuning, copy_s_per_byte=copy, nvls_s_per_byte=nvls),
        )

    def collective_s(
        self, name: str, handed_bytes: float, ranks: int, hosts: int = 1, algorithm: str = "best"
    ) -> float:
        """Return the seconds of one collective or message.

        ``ring``: a rank passes parts to its neighbour n - 1 times, for an all-reduce 2 (n - 1)
        times. The rings together use every network card of the group's ranks, and each part leaves
        a host once. ``tree``, only for an all-reduce over several hosts: the ranks of a host form a
        chain, the hosts two binary trees, up and down again; fewer steps, and twice the tensor's
        bytes. An all-reduce on one full host may also be made by its switch (NVLS), a gather or a
        reduce-scatter of one device per host in steps that double the distance (PAT). ``best`` is
        the quickest algorithm and protocol. An all-to-all sends each part directly.

        Args:
            name: such as "all_reduce", see ``collectives.WIRE_FRACTIONS``.
            handed_bytes: size of a rank's input tensor.
            ranks: number of ranks; equal groups fill the hosts and communicate at the same time.
            hosts: number of hosts over which they are spread evenly.
            algorithm: "ring", "tree" or "best".

        Raises:
            ValueError: name, algorithm or their combination is unknown.
        """
        if algorithm not in ("best", "ring", "tree") or (
            algorithm == "tree" and name != "all_reduce"
        ):
            raise ValueError(
                f"{name} by {algorithm!r}: take best or ring, or tree for an all_reduce"
            )
        if name not in WIRE_FRACTIONS:
            raise ValueError(f"{name!r} is none of {', '.join(WIRE_FRACTIONS)}")
        if ranks == 1 or not handed_bytes:
            return 0.0
        times = []
        for protocol in self.tuning.protocols:
            if algorithm != "tree":
                times.append(self._ring_s(name, handed_bytes, ranks, hosts, protocol))
            if name == "all_reduce" and algorithm != "ring" and (hosts > 1 or algorithm == "tree"):
                times.append(self._tree_s(handed_bytes, ranks, hosts, protocol))
        halves = name in ("all_gather", "reduce_scatter")
        if halves and ranks == hosts and algorithm == "best" and len(self.tuning.protocols) > 1:
            times.append(self._doubling_s(name, handed_bytes, ranks))
        switched = self.tuning.nvls_s_per_byte if hosts == 1 else None
        if name == "all_reduce" and algorithm == "best" and switched and ranks == self.devices:
            steps_s = NVLS_STEPS * self.inside.alpha_s
            times.append(
                self.call_s + steps_s + handed_bytes * switched * self._slower(handed_bytes)
            )
        return min(times)

    def _ring_s(
        self, name: str, handed_bytes: float, ranks: int, hosts: int, protocol: Protocol
    ) -> float:
        crossing = ring_step_count(name, hosts)
        steps_s = crossing * self.between.alpha_s * protocol.between
        inside_steps = ring_step_count(name, ranks) - crossing
        steps_s += inside_steps * self.inside.alpha_s * protocol.inside
        leaving = collective_wire_bytes(name, handed_bytes, ranks)
        tensor_bytes = handed_bytes * (ranks if name == "all_gather" else 1)
        inside = self._inside_s_per_byte(ranks, hosts, tensor_bytes)
        if name in ("all_to_all", "send", "recv"):
            # There is no ring: what goes to other hosts leaves through the rank's own network card.
            outside = leaving - handed_bytes * (math.ceil(ranks / hosts) - 1) / ranks
            outside = outside if name == "all_to_all" else leaving * (hosts > 1)
            bytes_s = max((leaving - outside) * inside, outside * self._card_s_per_byte(1))
        else:
            bytes_s = leaving * max(inside, self._cross_host_s_per_byte(ranks, hosts))
        passes = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}.get(name, 0.0)
        copy_s = passes * tensor_bytes * self.tuning.copy_s_per_byte
        # Between hosts the network is slower than the passes over memory, which hide behind it.
        bytes_s = bytes_s + copy_s if hosts == 1 else max(bytes_s, leaving * inside + copy_s)
        return self.call_s + steps_s + bytes_s / protocol.bandwidth

    def _doubling_s(self, name: str, handed_bytes: float, ranks: int) -> float:
        """Return the seconds of NCCL's PAT: a ring's bytes in fewer steps."""
        saved = ring_step_count(name, ranks) - math.ceil(math.log2(ranks))
        ring_s = self._ring_s(name, handed_bytes, ranks, ranks, SIMPLE)
        return ring_s - saved * self.between.alpha_s

    def _tree_s(self, handed_bytes: float, ranks: int, hosts: int, protocol: Protocol) -> float:
        levels = math.ceil(math.log2(hosts))
        chain_s = (math.ceil(ranks / hosts) - 1) * self.inside.alpha_s * protocol.inside
        steps_s = 2 * (chain_s + levels * self.between.alpha_s * protocol.between)
        slowest = max(
            self._inside_s_per_byte(ranks, hosts, handed_bytes),
            self._cross_host_s_per_byte(ranks, hosts),
        )
        # Up and down again.
        return self.call_s + steps_s + 2 * handed_bytes * slowest / protocol.bandwidth

    def _inside_s_per_byte(self, ranks: int, hosts: int, tensor_bytes: float) -> float:
        """Return seconds per byte between devices of a host, whose rings may be fewer."""
        by_ranks = 1.0
        if self.tuning.rings:
            by_ranks = self.tuning.rings[self.devices] / self.tuning.rings[math.ceil(ranks / hosts)]
        return self.inside.beta_s_per_byte * by_ranks * self._slower(tensor_bytes)

    def _slower(self, tensor_bytes: float) -> float:
        return (REFERENCE_BYTES / tensor_bytes) ** self.tuning.ramp

    def _cross_host_s_per_byte(self, ranks: int, hosts: int) -> float:
        """Return seconds per byte out of a host over all cards of the group's ranks, or 0."""
        return self._card_s_per_byte(math.ceil(ranks / hosts)) if hosts > 1 else 0.0

    def _card_s_per_byte(self, ranks_on_host: int) -> float:
        """Return seconds per byte over the share of a host's cards that these ranks have."""
        share = min(1.0, ranks_on_host / self.devices)
        return self.between.beta_s_per_byte / (self.cards * share)


NVLS_STEPS = 25 / 3.4
"""Latency of NVLS in steps of a ring, both with the protocol Simple: NCCL's tuning.cc."""


DATA_SHEETS = {
    "a100-8x": (300, 25),
    "v100-8x": (150, 12.5),
    "h100-8x": (450, 50),
    "b200-8x": (900, 50),
}
"""GB/s of a GPU's NVLinks and of a network card by data sheet, each in one direction."""


def _measured_links(
    sheet: str,
    *,
    call_us: float,
    step_us: float,
    share: float,
    copy_ps: float,
    ramp: float,
    between_us: float,
    between_share: float,
    nvls_ps: float | None = None,
    cards: int = 8,
    rings: Mapping[int, float] | None = None,
    network_measured: bool = True,
) -> Links:
    """Return the links of a host of eight GPUs from its data sheet and measured figures.

    Args:
        sheet: whose NVLinks and cards it has, one of ``DATA_SHEETS``.
        call_us: time of a call.
        step_us: time of a step inside a host.
        share: of the sheet's NVLinks that wire bytes reach, for a tensor of 1 GiB.
        copy_ps: picoseconds per byte, see ``Tuning.copy_s_per_byte``.
        ramp: see ``Tuning``.
        between_us: time of a step between hosts.
        between_share: of a card's bandwidth that is reached.
        nvls_ps: picoseconds per byte, see ``Tuning.nvls_s_per_byte``.
        cards: of a host.
        rings: see ``Tuning``.
        network_measured: see ``Tuning``.
    """
    nvlink, card = DATA_SHEETS[sheet]
    nvls_s_per_byte = nvls_ps and 1e-12 * nvls_ps
    return Links(
        inside=AlphaBeta(1e-6 * step_us, 1e-9 / (share * nvlink)),
        between=AlphaBeta(1e-6 * between_us, 1e-9 / (between_share * card)),
        devices=8,
        cards=cards,
        call_s=1e-6 * call_us,
        tuning=Tuning(
            NCCL_PROTOCOLS, 1e-12 * copy_ps, ramp, nvls_s_per_byte, rings, network_measured
        ),
    )


DGX1_RINGS = {1: 6, 2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
"""Rings over the NVLinks of the first so many V100s of a DGX-1, which has no switch.

Hamiltonian cycles over links that no other cycle uses, in both directions. The first five GPUs have
no such cycle; there a guess stands. Source of the links: NVIDIA, "DGX-1 With Tesla V100", 2017,
figure 4. Measured at 2, 4 and 8: 22.5, 85 and 134 GB/s.
"""

NCCL_NETWORK_STEP_US = 14.0
"""Latency of a step between hosts with which NCCL compares algorithms (tuning.cc)."""
UNSEEN_NETWORK_STEP_US = 78.0
"""Latency where no network was measured: the geometric mean of NCCL's constant and of EFA's 434."""

_A100: dict[str, Any] = {"call_us": 34.9, "step_us": 2.11, "ramp": 0.044}
_NETWORK_GUESS: dict[str, Any] = {
    "between_us": UNSEEN_NETWORK_STEP_US,
    "between_share": 0.95,
    "network_measured": False,
}
"""Hosts of which no collective between hosts was measured: a guess, nothing more."""


def _hopper(memory_gigabytes_per_s: float) -> Links:
    """Return the links of H100 and H200, borrowed: no collective of theirs was fitted.

    Call, step and ramp are those of A100, NVLinks reach the data sheet, a pass over memory is
    quicker than an A100's as the memory is, and NVLS is B200's for half the bandwidth, by the ratio
    of NCCL's two efficiencies (0.74 and 0.85).
    """
    return _measured_links(
        "h100-8x",
        share=1.0,
        copy_ps=1.82 * 2039 / memory_gigabytes_per_s,
        nvls_ps=2.34 * 2 * 0.74 / 0.85,
        **_A100,
        **_NETWORK_GUESS,
    )


MEASURED_LINKS: Mapping[str, Links] = {
    "a100-8x": _measured_links("a100-8x", share=1.02, copy_ps=1.82, **_A100, **_NETWORK_GUESS),
    "v100-8x": _measured_links(
        "v100-8x",
        call_us=45.3,
        step_us=0.54,
        share=0.906,
        copy_ps=0.117,
        ramp=0.0002,
        cards=4,
        rings=DGX1_RINGS,
        **_NETWORK_GUESS,
    ),
    "b200-8x": _measured_links(
        "b200-8x",
        call_us=18.8,
        step_us=11.1,
        share=0.566,
        copy_ps=0.648,
        ramp=0.0053,
        nvls_ps=2.34,
        between_us=434,
        between_share=1.0,
    ),
    "h100-8x": _hopper(3350),
    "h100-96gb-8x": _hopper(2400),
    "h200-8x": _hopper(4800),
}
"""Links by kind of hosts, fitted to ``benchmarks/data`` unless said otherwise.

A100, V100 and B200 inside a host, and B200 between hosts (EFA), are fitted by
``benchmarks/network.py``; H100 and H200, and all other networks, are not.
"""
