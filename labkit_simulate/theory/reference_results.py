"""What others have measured and published, with its configuration, to hold predictions against.

One row of each kind of hardware gave ``Hardware.matmul_share``: ``H100_ROWS[0]`` and
``A100_ROWS[0]``. All others are predicted with it, nothing else is fitted.

Sources, both of torchtitan (PyTorch's own trainer):

- benchmarks/llama3_h100_202412_torchtitan.md, December 2024: hosts of 8 H100 with 96 GB of HBM2e at
  2.4 TB/s, limited to 500 W; 400 Gb/s per GPU between hosts. The sequence length is not stated for
  these rows; 8192 is assumed, which gives the 33 to 39 % model FLOPs utilisation that the page
  states. Memory is what the allocator reserved.
- docs/performance.md of 2024: 64 A100 with 80 GB, in hosts with a network that it does not state;
  200 Gb/s per GPU is assumed. Sequence 8192 for Llama 3, 4096 for Llama 2. Whether programs were
  compiled is not stated; they are assumed to be eager.
"""

from dataclasses import dataclass

from labkit_simulate.theory.hardware import get_hardware
from labkit_simulate.theory.transformer import (
    LLAMA_2_13B,
    LLAMA_2_70B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    StepEstimate,
    TrainingSetup,
)

GIB = 2**30


@dataclass(frozen=True)
class ReferenceResult:
    """A published figure.

    Attributes:
        name: of the model and what is special.
        training: the configuration.
        hosts: by their name in ``hardware``.
        tokens_per_s: of a GPU, measured.
        memory_gib: of a GPU, reserved; None where not published.
    """

    name: str
    training: TrainingSetup
    hosts: str
    tokens_per_s: float
    memory_gib: float | None = None

    def estimate_step(self, matmul_share: float | None = None) -> StepEstimate:
        """The step that the formulas give, with the hardware's own share of its peak or another."""
        changed = {} if matmul_share is None else {"matmul_share": matmul_share}
        return self.training.estimate_step(get_hardware(self.hosts, **changed))


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
