"""Peak arithmetic, memory and link speeds of machines by data sheet, each figure with its source.

    get_hardware("h100-8x").flops_per_s["bfloat16"]    # 989.4e12, of one GPU, without sparsity

Figures are per *device*: a GPU, or a core of a processor. Arithmetic is dense; a figure with
sparsity is halved. Links of GPUs are as measured, see ``labkit.theory.links``: one direction, as a
ring uses them, at the share of the data sheet that collectives reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.theory.collectives import AlphaBeta
from labkit.theory.links import MEASURED_LINKS, PLAIN, Links, Protocol, Tuning

GIGA, TERA, MIB, US = 1e9, 1e12, 2**20, 1e-6
NVIDIA_URL = "https://www.nvidia.com/en-us/data-center/"
LINKS_SOURCE = {
    "a100-8x": "fitted to measured all-reduces on one host (benchmarks/network.py)",
    "v100-8x": "fitted to measured all-reduces on one host (benchmarks/network.py)",
    "b200-8x": "fitted to measured all-reduces on one and four hosts (benchmarks/network.py)",
}
BORROWED_LINKS = "not measured: borrowed from A100 and B200, see labkit.theory.links"
NETWORK_GUESS = "not measured: 95 % of {}; latency: a mean of NCCL's constant and of EFA's"
KERNEL_GAP_SOURCE = (
    "gap between kernels that are issued ahead, measured on a V100:"
    " https://developer.nvidia.com/blog/cuda-graphs/"
)
DRIVER_SOURCE = "the driver's own total (nvidia-smi); the sheet says {} GB"
TORCHTITAN_URL = "https://github.com/pytorch/torchtitan/blob/main/"
H100_TORCHTITAN_URL = TORCHTITAN_URL + "benchmarks/llama3_h100_202412_torchtitan.md"
ONE_H100_SOURCE = (
    "fitted to a decoder of two blocks on one H100: results/nvidia-h100-2026-11-27/35.json"
)
CALIBRATION_SOURCE = "what the first row of labkit_simulate.theory.reference_results.{} implies"


@dataclass(frozen=True)
class Hardware:
    """A kind of host, and the links between such hosts.

    Attributes:
        name: key in ``HARDWARE``.
        device: description of a device.
        devices: number of devices of a host.
        flops_per_s: peak FLOP/s of a device, by dtype.
        memory_bytes: memory of a device.
        memory_bytes_per_s: memory bandwidth of a device.
        inside: link between devices of a host: latency of a ring step, seconds per byte.
        between: link of a network card to other hosts.
        cards: network cards of a host, which its devices share evenly.
        call_s: time of a collective before its first byte moves.
        tuning: what else is known of the links, see ``labkit.theory.links``.
        operator_s: overhead of an operator.
        matmul_share: share of ``flops_per_s`` that matrix products reach.
        shared: whether ranks share the devices of a host, as processes share cores, so that
            communication takes time from computation. Otherwise each rank has a device, and
            communication overlaps computation.
        sources: source of each figure, by attribute.
    """

    name: str
    device: str
    devices: int
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    inside: AlphaBeta
    between: AlphaBeta
    cards: int
    call_s: float
    operator_s: float
    matmul_share: float
    shared: bool = False
    tuning: Tuning = PLAIN
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def for_rank(self, ranks_on_host: int) -> "Hardware":
        """Return a rank's share of a host with so many ranks.

        Raises:
            ValueError: more ranks than devices that cannot be shared.
        """
        if ranks_on_host < 1 or (ranks_on_host > self.devices and not self.shared):
            rule = f"take 1 to {self.devices} of them, and more hosts"
            raise ValueError(
                f"{ranks_on_host} ranks on a host of {self.devices} devices ({self.name}): {rule}"
            )
        if not self.shared:
            return self
        share = self.devices / ranks_on_host
        # Issuing an operator or a message is the work of one core, and more cores do not help.
        slower = max(1.0, ranks_on_host / self.devices)
        return replace(
            self,
            flops_per_s={dtype: share * rate for dtype, rate in self.flops_per_s.items()},
            memory_bytes=int(share * self.memory_bytes),
            memory_bytes_per_s=share * self.memory_bytes_per_s,
            inside=AlphaBeta(slower * self.inside.alpha_s, slower * self.inside.beta_s_per_byte),
            call_s=slower * self.call_s,
            operator_s=slower * self.operator_s,
        )

    @property
    def links(self) -> Links:
        """The links by which collectives are estimated."""
        return Links(self.inside, self.between, self.devices, self.cards, self.call_s, self.tuning)

    def with_links(self, links: Links) -> "Hardware":
        """Return these devices with other links, such as ``links.slower(4)``."""
        return replace(
            self,
            inside=links.inside,
            between=links.between,
            devices=links.devices,
            cards=links.cards,
            call_s=links.call_s,
            tuning=links.tuning,
        )

    def with_network(
        self,
        *,
        latency_us: float | None = None,
        bandwidth_share: float = 1.0,
        protocols: tuple[Protocol, ...] | None = None,
        measured: bool | None = None,
    ) -> "Hardware":
        """Return these devices with another network.

        Args:
            latency_us: of a step between hosts, by default the same.
            bandwidth_share: what this job has of each network card.
            protocols: those that NCCL may choose, also inside a host; by default the same.
            measured: whether the network counts as measured, by default as before.
        """
        links = self.links
        latency_s = links.between.alpha_s if latency_us is None else latency_us * US
        between = AlphaBeta(latency_s, links.between.beta_s_per_byte / bandwidth_share)
        known = links.tuning.network_measured if measured is None else measured
        tuning = replace(
            links.tuning,
            protocols=protocols or links.tuning.protocols,
            network_measured=known,
        )
        return self.with_links(replace(links, between=between, tuning=tuning))

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak FLOP/s of a device; raise ValueError for a dtype without a rate.

        A device without TF32 multiplies such numbers as float32.
        """
        if dtype == "tf32" and dtype not in self.flops_per_s:
            dtype = "float32"
        if dtype not in self.flops_per_s:
            raise ValueError(
                f"no rate for {dtype!r} numbers on {self.name}: it has"
                f" {', '.join(self.flops_per_s)}"
            )
        return self.flops_per_s[dtype]


def make_link(gigabytes_per_s: float, latency_us: float) -> AlphaBeta:
    """Return a link from its bandwidth and latency."""
    return AlphaBeta(latency_us * US, 1 / (gigabytes_per_s * GIGA))


def get_hardware(name: str, **changed: Any) -> Hardware:
    """Return a kind of host by name, with changed attributes such as ``matmul_share=0.5``.

    Raises:
        ValueError: the name or an attribute is unknown; the message lists the known ones.
    """
    if name not in HARDWARE:
        raise ValueError(
            f"hardware {name!r} is none of {', '.join(HARDWARE)}: take one of them, or make a"
            " Hardware"
        )
    unknown = [attribute for attribute in changed if attribute not in Hardware.__dataclass_fields__]
    if unknown:
        raise ValueError(
            f"hardware has no {unknown[0]!r}: it has {', '.join(Hardware.__dataclass_fields__)}"
        )
    return replace(HARDWARE[name], **changed)


def _gpu_host(
    name: str,
    device: str,
    *,
    flops: Mapping[str, float],
    memory_mib: int,
    memory_gigabytes_per_s: float,
    matmul_share: float,
    cards: str,
    sources: Mapping[str, str],
) -> Hardware:
    """Return a host of eight GPUs, with teraFLOP/s and with its ``MEASURED_LINKS``.

    ``cards`` describes the network cards, whose links are a guess if none of them was measured.
    """
    links = MEASURED_LINKS[name]
    return Hardware(
        name=name,
        device=device,
        devices=8,
        flops_per_s={dtype: rate * TERA for dtype, rate in flops.items()},
        memory_bytes=memory_mib * MIB,
        memory_bytes_per_s=memory_gigabytes_per_s * GIGA,
        inside=links.inside,
        between=links.between,
        cards=links.cards,
        call_s=links.call_s,
        tuning=links.tuning,
        operator_s=1.0 * US,
        matmul_share=matmul_share,
        sources={**sources, **_links_sources(name, cards), "operator_s": KERNEL_GAP_SOURCE},
    )


def _links_sources(name: str, cards: str) -> dict[str, str]:
    """Return the sources of the links: measured, borrowed or guessed."""
    inside = LINKS_SOURCE.get(name, BORROWED_LINKS)
    measured = MEASURED_LINKS[name].tuning.network_measured
    between = inside if measured else NETWORK_GUESS.format(cards)
    return {"inside": inside, "call_s": inside, "tuning": inside, "between": between}


def _data_sheet_sources(sheet: str, system: str, matmul_share: str, memory: str) -> dict[str, str]:
    """Return sources from the GPU's data sheet, the system's, and what is on neither."""
    return {
        "devices": system,
        "cards": system,
        "flops_per_s": sheet,
        "memory_bytes": memory,
        "memory_bytes_per_s": sheet,
        "matmul_share": matmul_share,
    }


_HOPPER_TFLOPS = {
    "float32": 66.9,
    "tf32": 494.7,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8": 1978.9,
}
_HOPPER_SHARE, _AMPERE_SHARE = 0.437, 0.652
_H100_PAPER = (
    "NVIDIA H100 Tensor Core GPU Architecture, table 2:"
    " https://resources.nvidia.com/en-us-tensor-core"
)
_DGX = {
    name: f"https://docs.nvidia.com/dgx/{name}-user-guide/introduction-to-{name}.html"
    for name in ("dgxh100", "dgxa100", "dgxb200")
}
_CONNECTX = "one card of {} Gb/s a GPU, {}"

HARDWARE: dict[str, Hardware] = {
    entry.name: entry
    for entry in (
        _gpu_host(
            "v100-8x",
            "NVIDIA V100 SXM2, 32 GB",
            flops={"float32": 15.7, "float16": 125},
            memory_mib=32768,
            memory_gigabytes_per_s=900,
            matmul_share=_AMPERE_SHARE,
            cards="four cards of 100 Gb/s a host (DGX-1)",
            sources=_data_sheet_sources(
                NVIDIA_URL + "v100/ (data sheet V100 SXM2)",
                "NVIDIA DGX-1 With Tesla V100 System Architecture, 2017",
                "that of a100-8x, for want of a measurement",
                NVIDIA_URL + "v100/ (data sheet V100 SXM2)",
            ),
        ),
        _gpu_host(
            "a100-8x",
            "NVIDIA A100 SXM, 80 GB",
            flops={"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312},
            memory_mib=81920,
            memory_gigabytes_per_s=2039,
            matmul_share=_AMPERE_SHARE,
            cards=_CONNECTX.format(200, _DGX["dgxa100"]),
            sources=_data_sheet_sources(
                NVIDIA_URL + "a100/ (data sheet A100 80GB SXM)",
                _DGX["dgxa100"],
                CALIBRATION_SOURCE.format("A100_ROWS"),
                DRIVER_SOURCE.format(80),
            ),
        ),
        _gpu_host(
            "h100-8x",
            "NVIDIA H100 SXM, 80 GB",
            flops=_HOPPER_TFLOPS,
            memory_mib=81559,
            memory_gigabytes_per_s=3350,
            matmul_share=_HOPPER_SHARE,
            cards=_CONNECTX.format(400, _DGX["dgxh100"]),
            sources=_data_sheet_sources(
                f"{NVIDIA_URL}h100/ (data sheet H100 SXM; to the digit in {_H100_PAPER})",
                _DGX["dgxh100"],
                CALIBRATION_SOURCE.format("H100_ROWS")
                + ", on cards held to 500 of 700 W: cautious",
                DRIVER_SOURCE.format(80),
            ),
        ),
        _gpu_host(
            "h100-96gb-8x",
            "NVIDIA H100 SXM, 96 GB of HBM2e, held to 500 W",
            flops=_HOPPER_TFLOPS,
            memory_mib=95 * 1024,
            memory_gigabytes_per_s=2400,
            matmul_share=_HOPPER_SHARE,
            cards=_CONNECTX.format(400, H100_TORCHTITAN_URL),
            sources=_data_sheet_sources(
                f"memory: {H100_TORCHTITAN_URL}; the rest: that of the H100 SXM, {_H100_PAPER}",
                H100_TORCHTITAN_URL,
                CALIBRATION_SOURCE.format("H100_ROWS"),
                f"96 GB by {H100_TORCHTITAN_URL}, of which a driver leaves about 95 GiB",
            ),
        ),
        _gpu_host(
            "h200-8x",
            "NVIDIA H200 SXM, 141 GB",
            flops=_HOPPER_TFLOPS,
            memory_mib=143771,
            memory_gigabytes_per_s=4800,
            matmul_share=_HOPPER_SHARE,
            cards=_CONNECTX.format(400, _DGX["dgxh100"]),
            sources=_data_sheet_sources(
                NVIDIA_URL + "h200/ (data sheet H200 SXM)",
                _DGX["dgxh100"],
                "that of h100-8x: the same chip",
                DRIVER_SOURCE.format(141),
            ),
        ),
        _gpu_host(
            "b200-8x",
            "NVIDIA B200 SXM, 180 GB",
            flops={"float32": 75, "tf32": 1125, "bfloat16": 2250, "float16": 2250, "float8": 4500},
            memory_mib=183359,
            memory_gigabytes_per_s=8000,
            matmul_share=_HOPPER_SHARE,
            cards=_CONNECTX.format(400, _DGX["dgxb200"]),
            sources=_data_sheet_sources(
                NVIDIA_URL + "hgx/ (HGX B200, an eighth of the board's)",
                _DGX["dgxb200"],
                "that of h100-8x, for want of a measurement",
                DRIVER_SOURCE.format(180),
            ),
        ),
        Hardware(
            name="laptop",
            device="a core at 3 GHz with AVX2",
            devices=2,
            flops_per_s={"float32": 96 * GIGA},
            memory_bytes=8 * 2**30,
            memory_bytes_per_s=25.6 * GIGA,
            inside=make_link(2.0, 50.0),
            between=make_link(0.125, 100.0),
            cards=1,
            call_s=200 * US,
            operator_s=10 * US,
            matmul_share=0.8,
            shared=True,
            sources={
                "devices": "assumed: as small as the course's machine, two cores and 16 GB",
                "flops_per_s": (
                    "2 FMA units x 8 numbers x 2 operations x 3 GHz:"
                    " https://www.agner.org/optimize/"
                ),
                "memory_bytes": "assumed, see devices",
                "memory_bytes_per_s": (
                    "two channels of DDR4-3200, half for each core: JEDEC JESD79-4"
                ),
                "inside": (
                    "assumed: gloo over loopback; calibrate instead, see"
                    " labkit_simulate.theory.calibration"
                ),
                "between": "gigabit Ethernet, IEEE 802.3ab; latency assumed",
                "cards": "assumed",
                "call_s": "assumed: calibrate instead",
                "tuning": "none: a ring with one protocol",
                "operator_s": "assumed: calibrate instead",
                "matmul_share": "assumed: calibrate instead",
            },
        ),
    )
}
_H100 = HARDWARE["h100-8x"]
HARDWARE["h100-1x"] = replace(
    _H100,
    name="h100-1x",
    device="NVIDIA H100 SXM, 80 GB, alone",
    devices=1,
    cards=1,
    matmul_share=0.757,
    sources={**_H100.sources, "matmul_share": ONE_H100_SOURCE},
)
