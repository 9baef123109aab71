"""What others have measured and published, with its configuration, to hold predictions against.

The first row of each tuple gave a share of the peak that matrix products reach: torchtitan's on
H100 and A100 ``Hardware.matmul_share``, vTrain's ``VTRAIN_SHARE``. ``VTRAIN_FITTED`` gave the
cards of vTrain's hosts. All others are predicted.

Sources, the first two of torchtitan (PyTorch's own trainer):

- benchmarks/llama3_h100_202412_torchtitan.md, December 2024: hosts of 8 H100 with 96 GB of HBM2e at
  2.4 TB/s, limited to 500 W; 400 Gb/s per GPU between hosts. The sequence length is not stated for
  these rows; 8192 is assumed, which gives the 33 to 39 % model FLOPs utilisation that the page
  states. Memory is what the allocator reserved.
- docs/performance.md of 2024: 64 A100 with 80 GB, in hosts with a network that it does not state;
  200 Gb/s per GPU is assumed. Sequence 8192 for Llama 3, 4096 for Llama 2. Whether programs were
  compiled is not stated; they are assumed to be eager.
- benchmarks/data/vtrain.csv: a GPT of 3.6 billion parameters on 64 A100, DDP x TP. Recomputation
  and fused kernels are assumed. Network cards are not stated; four a host are assumed, since the
  rows with TP over two hosts reach half the bandwidth of eight. That is fitted to them.
- benchmarks/data/nanotron.csv: the rows on 256 H100 without pipeline, ZeRO-1 x TP. Shapes follow
  from the numbers of parameters; nothing is recomputed. Step times are what the MFU implies.
- torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: FSDP x TP, compiled, the rows in
  bf16 without asynchronous TP.
- IBM, README.md of foundation-model-stack/fms-fsdp: 128 A100 with 400 Gb/s and 96 H100 with 800
  Gb/s, taken to be a host's; sequence 4096. Eager rows of March 2024, compiled ones of May 2024.
  The compiled rows of 34B and 70B recompute everything, as their HFU over MFU says. The rows of 13B
  are left out: they recompute a share of the blocks that is not stated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.replicated import ReplicatedSetup
from labkit_simulate.theory.transformer import (
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_2_34B,
    LLAMA_2_70B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    Checkpointing,
    DecoderShape,
    StepEstimate,
    TrainingSetup,
)

GIB = 2**30
VTRAIN_SHARE, VTRAIN_CARDS = 0.446, 4
"""Of A100s under vTrain's program: the share that its first row implies, and cards of a host."""
PRODUCT_S = 68e-6
"""What a product costs beside its arithmetic: fitted to vTrain's rows with TP 1 and 2, together
with a share of 0.45, by benchmarks/published.py. Taken for nanotron's smaller products.
"""


@dataclass(frozen=True)
class ReferenceResult:
    """A published figure.

    Attributes:
        name: of the model and what is special.
        training: the configuration.
        hosts: by their name in ``hardware``.
        tokens_per_s: of a GPU, measured.
        memory_gib: of a GPU, reserved; None where not published.
        cards: network cards of a host.
    """

    name: str
    training: TrainingSetup
    hosts: str
    tokens_per_s: float
    memory_gib: float | None = None
    cards: int = 8

    @property
    def hardware(self) -> Hardware:
        """The hosts with their network cards."""
        return get_hardware(self.hosts, cards=self.cards)

    def estimate_step(self, matmul_share: float | None = None) -> StepEstimate:
        """The step that the formulas give, with the hardware's own share of its peak or another."""
        share = self.hardware.matmul_share if matmul_share is None else matmul_share
        return self.training.estimate_step(replace(self.hardware, matmul_share=share))


H100_RESULTS = (
    ReferenceResult(
        "Llama 3.1 8B", TrainingSetup(LLAMA_3_8B, 2, 8192, 8), "h100-96gb-8x", 5762, 82.4
    ),
    ReferenceResult(
        "Llama 3.1 8B, compiled",
        TrainingSetup(LLAMA_3_8B, 2, 8192, 8, compiled=True),
        "h100-96gb-8x",
        6667,
        77.0,
    ),
    ReferenceResult(
        "Llama 3.1 8B", TrainingSetup(LLAMA_3_8B, 2, 8192, 128), "h100-96gb-8x", 5605, 67.0
    ),
    ReferenceResult(
        "Llama 3.1 8B, compiled",
        TrainingSetup(LLAMA_3_8B, 2, 8192, 128, compiled=True),
        "h100-96gb-8x",
        6514,
        62.0,
    ),
)
A100_RESULTS = (
    ReferenceResult("Llama 3 8B", TrainingSetup(LLAMA_3_8B, 1, 8192, 64), "a100-8x", 2973),
    ReferenceResult("Llama 3 70B", TrainingSetup(LLAMA_3_70B, 1, 8192, 64, "full"), "a100-8x", 331),
    ReferenceResult(
        "Llama 2 13B", TrainingSetup(LLAMA_2_13B, 2, 4096, 64, "none"), "a100-8x", 2162
    ),
    ReferenceResult("Llama 2 13B", TrainingSetup(LLAMA_2_13B, 2, 4096, 64), "a100-8x", 1904),
    ReferenceResult("Llama 2 70B", TrainingSetup(LLAMA_2_70B, 1, 4096, 64), "a100-8x", 355),
    ReferenceResult("Llama 2 70B", TrainingSetup(LLAMA_2_70B, 2, 4096, 64, "full"), "a100-8x", 353),
)


def _ibm_results() -> Iterator[ReferenceResult]:
    for size, shape, checkpointing, shards, compiled, *tokens_per_s in IBM_TOKENS_PER_S:
        for hosts, ranks, measured in zip(
            ("a100-8x", "h100-8x"), (128, 96), tokens_per_s, strict=True
        ):
            setup = TrainingSetup(
                shape, 2, 4096, ranks, checkpointing, compiled, shard_ranks=shards
            )
            name = f"Llama 2 {size}" + ", compiled" * compiled
            yield ReferenceResult(name, setup, hosts, measured, cards=2)


IBM_TOKENS_PER_S: tuple[
    tuple[str, DecoderShape, Checkpointing, int | None, bool, float, float], ...
] = (
    ("7B, HSDP", LLAMA_2_7B, "none", 8, False, 3700, 7500),
    ("7B, HSDP", LLAMA_2_7B, "none", 8, True, 4550, 9600),
    ("34B", LLAMA_2_34B, "full", None, False, 700, 1550),
    ("34B", LLAMA_2_34B, "full", None, True, 820, 1830),
    ("70B", LLAMA_2_70B, "full", None, False, 370, 800),
    ("70B", LLAMA_2_70B, "full", None, True, 410, 890),
)
"""Model, what is recomputed, shards if not all, compiled; tokens/s of an A100 and of an H100."""
IBM_RESULTS = tuple(_ibm_results())


@dataclass(frozen=True)
class ReplicatedResult:
    """A published step under data and tensor parallelism; ``step_s`` was measured."""

    name: str
    setup: ReplicatedSetup
    hosts: Hardware
    step_s: float


def _vtrain_results() -> tuple[ReplicatedResult, ...]:
    # Its feedforward of two matrices 4 d wide has the weights of three that are 8/3 d wide.
    shape = DecoderShape(3072, 30, 32, 32, 8192, 51200)
    hosts = get_hardware("a100-8x", matmul_share=VTRAIN_SHARE, cards=VTRAIN_CARDS)
    full: Checkpointing = "full"
    return tuple(
        ReplicatedResult(
            f"GPT 3.6B, micro batch {batch}",
            ReplicatedSetup(
                shape, batch, 2048, 64 // tensor, tensor, 8 * tensor // batch, full, 0, True
            ),
            hosts,
            step_ms / 1e3,
        )
        for tensor, batch, step_ms in VTRAIN_STEPS_MS
    )


VTRAIN_STEPS_MS = (
    (1, 8, 3566.5),
    (1, 4, 3638.3),
    (2, 8, 3975.2),
    (1, 2, 3700.5),
    (2, 16, 3937.5),
    (2, 4, 4078.2),
    (2, 2, 4264.2),
    (4, 16, 4492.1),
    (4, 32, 4548.2),
    (4, 8, 4634.4),
    (4, 4, 4764.0),
    (4, 2, 6228.3),
    (8, 64, 9838.9),
    (8, 32, 4972.3),
    (8, 16, 5017.8),
    (8, 8, 5178.0),
    (8, 4, 5618.0),
    (8, 2, 8880.9),
    (16, 32, 10580.6),
    (16, 16, 10719.3),
    (16, 8, 10894.0),
    (16, 4, 11960.1),
    (16, 2, 13472.2),
)
"""Tensor parallelism, micro batch and milliseconds of each row of benchmarks/data/vtrain.csv."""
VTRAIN_RESULTS = _vtrain_results()
VTRAIN_FITTED = [line for line in VTRAIN_RESULTS if line.setup.tensor > 8]
"""Rows with tensor parallelism over two hosts: they gave ``VTRAIN_CARDS``, at 78 µs."""


def _nanotron_result(
    billions: str, shape: DecoderShape, batch: int, tensor: int, tied: bool, flops_share: float
) -> ReplicatedResult:
    hosts = get_hardware("h100-8x")
    setup = ReplicatedSetup(
        shape, batch, 4096, 256 // tensor, tensor, 1, "none", 1, tied, product_s=PRODUCT_S
    )
    flops = setup.tokens / setup.ranks * shape.model_flops(4096)
    step_s = flops / hosts.peak_flops_per_s("bfloat16") / flops_share
    return ReplicatedResult(f"nanotron {billions}B", setup, hosts, step_s)


NANOTRON_RESULTS = (
    _nanotron_result("1.34", DecoderShape(2048, 16, 32, 32, 8192, 131072), 4, 4, True, 0.2320),
    _nanotron_result("3.57", DecoderShape(3072, 28, 24, 24, 8192, 131072), 4, 4, True, 0.2677),
    _nanotron_result("8.86", DecoderShape(4096, 32, 32, 32, 14336, 131072), 8, 8, False, 0.3271),
)


def _tensor_result(
    name: str, shape: DecoderShape, batch: int, data: int, recompute: Checkpointing, tokens: float
) -> ReplicatedResult:
    setup = ReplicatedSetup(shape, batch, 8192, data, 8, 1, recompute, 3)
    step_s = setup.tokens / setup.ranks / tokens
    return ReplicatedResult(name, setup, get_hardware("h100-96gb-8x"), step_s)


TORCHTITAN_TENSOR_RESULTS = (
    _tensor_result("torchtitan Llama 3.1 8B", LLAMA_3_8B, 12, 8, "selective", 4378),
    _tensor_result("torchtitan Llama 3.1 70B", LLAMA_3_70B, 16, 32, "full", 597),
)
"""FSDP over 8 or 32 groups of TP 8."""


def estimated_over_published(
    slower: float = 1.0, latency_us: float | None = None, *, fitted: bool = True
) -> list[tuple[int, float]]:
    """Return hosts, and estimated over published seconds, of each row that lab 6b looks at.

    They are IBM's, vTrain's but the first, and torchtitan's with tensor parallelism.

    Args:
        slower: how many times as long everything takes on the links.
        latency_us: of a step between hosts, by default that of the hardware.
        fitted: whether to return vTrain's rows with tensor parallelism over two hosts, too, to
            which its hosts' network cards were fitted.
    """

    def changed(hosts: Hardware) -> Hardware:
        links = hosts.with_network(latency_us=latency_us).links
        return hosts.with_links(links.slower(slower))

    pairs = []
    for row in IBM_RESULTS:
        step_s = row.training.estimate_step(changed(row.hardware)).time.step_s
        pairs.append((row.training.ranks // 8, step_s * row.tokens_per_s / row.training.tokens))
    for line in (*VTRAIN_RESULTS[1:], *TORCHTITAN_TENSOR_RESULTS):
        if line in VTRAIN_FITTED and not fitted:
            continue
        step_s = line.setup.estimate_step(changed(line.hosts)).step_s
        pairs.append((line.setup.ranks // 8, step_s / line.step_s))
    return pairs


def published_by(*, fitted: bool = True) -> list[str]:
    """Return who published each row of ``estimated_over_published``, in its order."""
    vtrain = len(VTRAIN_RESULTS) - 1 - (0 if fitted else len(VTRAIN_FITTED))
    counts = {
        "IBM": len(IBM_RESULTS),
        "vTrain": vtrain,
        "torchtitan": len(TORCHTITAN_TENSOR_RESULTS),
    }
    return [source for source, count in counts.items() for _ in range(count)]


def fit_matmul_share(row: ReferenceResult) -> float:
    """The share of the peak that matrix products must reach for a prediction to be what was
    measured.
    """
    low, high = 0.01, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if row.estimate_step(middle).tokens_per_s < row.tokens_per_s:
            low = middle
        else:
            high = middle
    return high
