"""Estimate a training step under data parallelism with tensor parallelism, without pipeline.

    ReplicatedSetup(LLAMA_3_8B, batch=4, sequence=4096, data=64, tensor=4).estimate_step_s(hosts)

Every group of ``tensor`` neighbouring ranks holds a model and trains ``accumulate`` micro batches a
step. Matrices are cut as in Megatron (Shoeybi et al., 2019, arXiv:1909.08053): a block sums its
output twice in the forward pass and twice in the backward pass, and nothing hides that. Gradients
are summed over the data axis during the last backward pass: reduced, and under ZeRO-1 the updated
parameters gathered afterwards (Rajbhandari et al., 2020, arXiv:1910.02054). ZeRO-3, which FSDP is,
gathers every block's parameters during both passes instead.
"""

import math
from dataclasses import dataclass, replace

from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.step_time import Group, Operator, collective_s, operator_s
from labkit_simulate.theory.transformer import (
    ADAM_BYTES,
    COMPUTE_BYTES,
    FLOAT_BYTES,
    Checkpointing,
    DecoderShape,
    TrainingSetup,
)


@dataclass(frozen=True)
class ReplicatedStep:
    """Seconds of a step: all of it, and what ranks wait for collectives."""

    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class ReplicatedSetup:
    """Training with data and tensor parallelism; Adam in float32.

    Attributes:
        model: its shape.
        batch: sequences of a micro batch.
        sequence: tokens of a sequence.
        data: groups that train different samples.
        tensor: neighbouring ranks that share a model.
        accumulate: micro batches of a step.
        checkpointing: see ``TrainingSetup``.
        zero: stage of ZeRO, 0, 1 or 3; 3 with one micro batch.
        tied: whether the output layer has the embedding's parameters.
        product_s: what a block's product costs beside its arithmetic, with the launches around it.
    """

    model: DecoderShape
    batch: int
    sequence: int
    data: int
    tensor: int = 1
    accumulate: int = 1
    checkpointing: Checkpointing = "none"
    zero: int = 1
    tied: bool = False
    product_s: float = 0.0

    def __post_init__(self) -> None:
        # FSDP gathers and reduces in every micro batch, whose overlap the formula does not have.
        if self.zero == 3 and self.accumulate > 1:
            what = f"zero = 3 with accumulate = {self.accumulate} is not estimated"
            raise ValueError(f"{what}: take one micro batch, or zero = 1")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor

    @property
    def tokens(self) -> int:
        """Tokens of all ranks in a step."""
        return self.data * self.accumulate * self.batch * self.sequence

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.model.parameters - self.tied * self.model.vocab * self.model.width

    def estimate_step(self, hosts: Hardware) -> ReplicatedStep:
        """Estimate a step on full hosts, one after another filled with groups."""
        rank, devices = hosts.for_rank(min(self.ranks, hosts.devices)), hosts.devices
        tensor = Group(self.tensor, math.ceil(self.tensor / devices))
        data = Group(self.data, min(self.data, math.ceil(self.ranks / devices)))
        forward_s, backward_s = self._micro_batch_s(rank)
        sent_bytes = COMPUTE_BYTES * self.batch * self.sequence * self.model.width
        # A recomputed forward pass sums again; a selective one only gathers.
        again = {"none": 0, "selective": 1, "full": 2}[self.checkpointing]
        sums = (4 + again) * self.model.layers + 2
        tensor_s = sums * collective_s("all_reduce", sent_bytes, tensor, rank)
        reduce_s, gather_s = self._data_s(rank, data)
        update = ADAM_BYTES * self.parameters / self.tensor / (self.data if self.zero else 1)
        # The sum of the last gradients, of about a block, is over after the backward pass.
        units = self.model.layers + 1
        if self.zero == 3:
            first_s = max(gather_s / units, gather_s - forward_s)
            late_s = first_s + max(reduce_s / units, gather_s + reduce_s - backward_s)
        else:
            late_s = max(reduce_s / units, reduce_s - backward_s) + gather_s
        exposed_s = self.accumulate * tensor_s + late_s
        compute_s = self.accumulate * (forward_s + backward_s)
        compute_s += operator_s(Operator("adam", moved_bytes=update), rank)
        return ReplicatedStep(compute_s + exposed_s, exposed_s)

    def _micro_batch_s(self, rank: Hardware) -> tuple[float, float]:
        """Return the seconds of both passes over a micro batch; compiled kernels are taken."""
        whole = TrainingSetup(
            self.model, self.batch, self.sequence, 1, self.checkpointing, compiled=True
        )
        head = whole.head_times(rank)
        passes = (
            (operators, extra)
            for operators, extra in zip(
                whole.block_operators(), (head.forward_s, head.backward_s), strict=True
            )
        )
        forward_s, backward_s = (
            self.model.layers * sum(self._operator_s(each, rank) for each in operators)
            + extra / self.tensor
            for operators, extra in passes
        )
        return forward_s, backward_s

    def _operator_s(self, operator: Operator, rank: Hardware) -> float:
        """Return the seconds of a rank's part of an operator, as if sequences were cut, too."""
        own = replace(
            operator,
            flops=operator.flops / self.tensor,
            moved_bytes=operator.moved_bytes / self.tensor,
        )
        return operator_s(own, rank) + (self.product_s if own.flops else 0.0)

    def _data_s(self, rank: Hardware, data: Group) -> tuple[float, float]:
        """Return the seconds of summing gradients and of gathering parameters, all in one call."""
        own = self.parameters / self.tensor
        if not self.zero:
            return collective_s("all_reduce", COMPUTE_BYTES * own, data, rank), 0.0
        reduce_s = collective_s("reduce_scatter", FLOAT_BYTES * own, data, rank)
        shard_bytes = COMPUTE_BYTES * own / self.data
        return reduce_s, collective_s("all_gather", shard_bytes, data, rank)
