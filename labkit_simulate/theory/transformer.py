"""A training step of a decoder such as Llama's under FSDP, from its shape alone: parameters,
operations, bytes, time.

    step = Training(LLAMA_3_8B, batch=2, sequence=8192, ranks=128).on(hardware("h100-8x"))
    step.tokens_per_s, step.memory_bytes

A token takes two operations for each weight that it meets in the forward pass, four in the backward
pass (Kaplan et al., 2020, arXiv:2001.08361), and attention's: 4 x sequence x width a block, or half
of it where a token sees only what comes before it, 2.5 times as many in the backward pass (Dao,
"FlashAttention-2", 2023, arXiv:2307.08691, section 3.1).

What multiplies no matrices moves bytes. They are counted operator by operator for a block as it is
commonly written, numbers of 2 bytes with norms and rotations in float32; ``COMPILER_BLOCK_BYTES``
are those that remain if a compiler fuses neighbouring operators. B is bytes for each number of that
width.

Letters: d width, k width of keys and values, f of the feedforward part.
"""

from dataclasses import dataclass, replace
from typing import Literal

from labkit_simulate.theory.hardware import Hardware
from labkit_simulate.theory.step_time import (
    Group,
    Operator,
    StepTime,
    UnitTimes,
    collective_s,
    fsdp_tasks,
    operator_s,
    schedule_tasks,
)

COMPUTE_BYTES, FLOAT_BYTES = 2, 4
"""Bytes of a number in arithmetic and gathers, and of one that is kept, updated or reduced."""
ATTENTION_BACKWARD = 2.5
ADAM_BYTES = 40
"""Moved for each parameter by an update: read p, g, m, v; write p, m, v; and its part in clipping
gradients.
"""
EAGER_BLOCK_BYTES, COMPILER_BLOCK_BYTES = {"d": 112, "k": 24, "f": 10}, {"d": 28, "k": 8, "f": 6}
"""Bytes that a block's operators without matrices move in the forward pass, for each number of that
width.

Eager, d: two norms of 36 (to float32 6, square 8, mean 4, times its root 8, back 6, times weight
4), rotated queries 20 (to float32 6, complex product 8, back 6), keys and values for all heads 4,
heads side by side 4, two sums of 6. k: rotated keys 20, keys and values read 4. f: silu 4, times
the other half 6.

Fused, d: two norms with the sum before them of 8, rotated queries 4, heads as above 8. k: rotated
keys 4, keys and values read 4. f: silu and product at once 6.
"""


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a model.

    Attributes:
        width: d, of what a block takes and gives.
        layers: blocks.
        heads: of attention.
        kv_heads: of its keys and values.
        feedforward: f.
        vocab: words.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    feedforward: int
    vocab: int

    @property
    def kv_width(self) -> int:
        """Of keys and values, k."""
        return self.width // self.heads * self.kv_heads

    @property
    def matmul_weights(self) -> tuple[int, ...]:
        """Weights of a block's matrix products, in their order: query, key, value, output, gate,
        up, down.
        """
        d, k, f = self.width, self.kv_width, self.feedforward
        return d * d, d * k, d * k, d * d, d * f, d * f, f * d

    @property
    def matmul_output_widths(self) -> tuple[int, ...]:
        """Numbers that each product gives for a token."""
        d, k, f = self.width, self.kv_width, self.feedforward
        return d, k, k, d, f, f, d

    @property
    def block_parameters(self) -> int:
        """Of one block, norms included."""
        return sum(self.matmul_weights) + 2 * self.width

    @property
    def root_parameters(self) -> int:
        """Of embedding, last norm and output layer."""
        return 2 * self.vocab * self.width + self.width

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.layers * self.block_parameters + self.root_parameters

    def model_flops(self, sequence: int) -> float:
        """Operations that training needs for a token: 6 a weight that is multiplied, and attention
        to all tokens.

        As model FLOPs are usually stated: nothing recomputed, and attention counted in full.
        """
        weights = self.layers * sum(self.matmul_weights) + self.vocab * self.width
        return 6 * weights + 12 * self.layers * self.width * sequence


LLAMA_3_8B = DecoderShape(
    width=4096, layers=32, heads=32, kv_heads=8, feedforward=14336, vocab=128256
)
LLAMA_3_70B = DecoderShape(
    width=8192, layers=80, heads=64, kv_heads=8, feedforward=28672, vocab=128256
)
LLAMA_2_7B = DecoderShape(
    width=4096, layers=32, heads=32, kv_heads=32, feedforward=11008, vocab=32000
)
LLAMA_2_13B = DecoderShape(
    width=5120, layers=40, heads=40, kv_heads=40, feedforward=13824, vocab=32000
)
LLAMA_2_70B = DecoderShape(
    width=8192, layers=80, heads=64, kv_heads=8, feedforward=28672, vocab=32000
)
TINY_DECODER = DecoderShape(width=32, layers=2, heads=4, kv_heads=2, feedforward=64, vocab=96)
"""For any machine."""

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class StepEstimate:
    """What is to be expected of a step, for each rank.

    Attributes:
        time: the step on its time line.
        tokens_per_s: of a rank.
        model_flops_share: MFU.
        memory_bytes: of a rank's tensors when they take most.
    """

    time: StepTime
    tokens_per_s: float
    model_flops_share: float
    memory_bytes: float


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained: FSDP over all ranks, a unit a block, the rest in the root; Adam.

    Attributes:
        model: its shape.
        batch: sequences of a rank in a step.
        sequence: tokens of each.
        ranks: how many.
        checkpointing: ``full`` recomputes every block in the backward pass, ``selective`` all but
            attention and every other product, as torchtitan does.
        compiled: whether neighbouring operators are fused.
        dtype: of the arithmetic.
    """

    model: DecoderShape
    batch: int
    sequence: int
    ranks: int
    checkpointing: Checkpointing = "selective"
    compiled: bool = False
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return self.batch * self.sequence

    def estimate_step(self, hosts: Hardware) -> StepEstimate:
        """The step on as few such hosts as hold the ranks.

        Raises:
            ValueError: the ranks do not fill whole hosts.
        """
        on_host = min(self.ranks, hosts.devices)
        if self.ranks % on_host:
            raise ValueError(
                f"{self.ranks} ranks do not fill hosts of {on_host}: {self.ranks} % {on_host} ="
                f" {self.ranks % on_host}"
            )
        time = self._step_time(hosts.for_rank(on_host), Group(self.ranks, self.ranks // on_host))
        flops = self.tokens * self.model.model_flops(self.sequence)
        return StepEstimate(
            time=time,
            tokens_per_s=self.tokens / time.step_s,
            model_flops_share=time.model_flops_share(flops, hosts.peak_flops_per_s(self.dtype)),
            memory_bytes=self.peak_memory_bytes(),
        )

    def _step_time(self, rank: Hardware, group: Group) -> StepTime:
        model = self.model
        update_s = operator_s(
            Operator("adam", moved_bytes=ADAM_BYTES * model.parameters / self.ranks), rank
        )
        root = self._unit_times("root", model.root_parameters, [], [], rank, group)
        head = self._head_times(rank)
        blocks = [
            self._unit_times(
                f"block {index}", model.block_parameters, *self._block_operators(), rank, group
            )
            for index in range(model.layers)
        ]
        # The backward pass begins with the last block, which is still gathered.
        blocks[-1] = replace(blocks[-1], regathered=False)
        units = [replace(root, regathered=False), *blocks, head]
        return schedule_tasks(fsdp_tasks(units, update_s=update_s), overlaps=not rank.shared)

    def _unit_times(
        self,
        name: str,
        parameters: int,
        forward: list[Operator],
        backward: list[Operator],
        rank: Hardware,
        group: Group,
    ) -> UnitTimes:
        """A unit's times. What was gathered is copied to where it is used, and gradients to where
        they are reduced.
        """
        copies = (
            Operator("copy", moved_bytes=2 * COMPUTE_BYTES * parameters),
            Operator("copy", moved_bytes=6 * parameters),
        )
        return UnitTimes(
            name=name,
            gather_s=collective_s(
                "all_gather", COMPUTE_BYTES * parameters / self.ranks, group, rank
            ),
            forward_s=sum(operator_s(each, rank) for each in [*forward, copies[0]]),
            backward_s=sum(operator_s(each, rank) for each in [*backward, *copies]),
            reduce_s=collective_s("reduce_scatter", FLOAT_BYTES * parameters, group, rank),
        )

    def _block_operators(self) -> tuple[list[Operator], list[Operator]]:
        """Operators of a block's forward pass, and of its backward pass with what is recomputed
        there.
        """
        model, tokens = self.model, self.tokens
        products = [self._matmul_operator(weights) for weights in model.matmul_weights]
        attention = Operator(
            "attention", 2 * tokens * self.sequence * model.width, dtype=self.dtype
        )
        factors = COMPILER_BLOCK_BYTES if self.compiled else EAGER_BLOCK_BYTES
        widths = {"d": model.width, "k": model.kv_width, "f": model.feedforward}
        others = Operator(
            "others", moved_bytes=tokens * sum(factors[name] * widths[name] for name in widths)
        )
        again = {
            "none": [],
            "selective": [*products[1::2], others],
            "full": [
                *products[:-1],
                attention,
                others,
                # The output of the last product is not needed for the backward pass.
            ],
        }[self.checkpointing]
        backward = [
            *again,
            *(each for each in products for _ in range(2)),
            replace(attention, flops=ATTENTION_BACKWARD * attention.flops),
            replace(others, moved_bytes=2 * others.moved_bytes),
        ]
        return [*products, attention, others], backward

    def _head_times(self, rank: Hardware) -> UnitTimes:
        """The output layer and the loss; the root's parameters are there already."""
        numbers = self.tokens * self.model.vocab
        product = self._matmul_operator(self.model.vocab * self.model.width)
        # to float32, log-softmax; backward: of the loss, of log-softmax, back from float32
        forward, backward = (4, 12) if self.compiled else (14, 22)
        return UnitTimes(
            name="head",
            gather_s=0.0,
            forward_s=operator_s(product, rank)
            + operator_s(Operator("loss", moved_bytes=forward * numbers), rank),
            backward_s=2 * operator_s(product, rank)
            + operator_s(Operator("loss", moved_bytes=backward * numbers), rank),
            reduce_s=0.0,
            regathered=False,
        )

    def _matmul_operator(self, weights: int) -> Operator:
        return Operator("mm", 2 * self.tokens * weights, dtype=self.dtype)

    def peak_memory_bytes(self) -> float:
        """What a rank's tensors take when they take most: the largest of the moments at which that
        may be.

        Attention that keeps its scores' sums alone, an optimizer that updates in place. Counted
        operator by operator in simulations of ``launch/decoder.py``.
        """
        last = self.model.layers - 1
        backward = [
            self._bytes_in_backward(block) for block in {last, max(0, last - 1), min(1, last), 0}
        ]
        return max(self._bytes_at_loss(), *backward, self._bytes_at_end())

    def _bytes_at_loss(self) -> float:
        """When the loss's gradient has just been made.

        Shards in float32 with Adam's two numbers; what blocks keep, and the last norm, twice in
        float32 and once not; the logits' log-softmax, its gradient and the logits' gradient in
        float32; the gathered root and the last block.
        """
        model = self.model
        return (
            self._shard_bytes
            + self._activation_bytes_per_token * self.tokens * model.layers
            + (2 * FLOAT_BYTES + COMPUTE_BYTES) * self.tokens * model.width
            + 3 * FLOAT_BYTES * self.tokens * model.vocab
            + COMPUTE_BYTES * (model.root_parameters + model.block_parameters)
        )

    def _bytes_in_backward(self, block: int) -> float:
        """In a block's backward pass: at the gradient of SwiGLU's product, or when the block's
        gradients are all there.

        Shards as above, those of gradients of the blocks behind it; the gradients of the one behind
        it, still on their way in float32; what the blocks before it keep; gathered root, this block
        and the next; the output layer's gradient; what the block computes with.
        """
        model = self.model
        behind = model.layers - 1 - block
        d, k, f = model.width, model.kv_width, model.feedforward
        norms = {"none": 26, "full": 28, "selective": 30}[self.checkpointing] * d
        others = 4 * k + 12 * f + FLOAT_BYTES * model.heads
        return (
            self._shard_bytes
            + FLOAT_BYTES * model.block_parameters * behind / self.ranks
            + FLOAT_BYTES * model.block_parameters * (behind > 0)
            + self._activation_bytes_per_token * self.tokens * block
            + COMPUTE_BYTES * (model.root_parameters + model.block_parameters * (1 + (block > 0)))
            + COMPUTE_BYTES * model.vocab * d
            + norms * self.tokens
            + max(
                others * self.tokens + COMPUTE_BYTES * d * f, COMPUTE_BYTES * model.block_parameters
            )
        )

    def _bytes_at_end(self) -> float:
        """When the root's gradients go to be reduced, last of all: they, and a copy in float32; all
        others' shards.
        """
        model = self.model
        reduced = FLOAT_BYTES * model.layers * model.block_parameters / self.ranks
        return self._shard_bytes + reduced + (COMPUTE_BYTES + FLOAT_BYTES) * model.root_parameters

    @property
    def _shard_bytes(self) -> float:
        """Of parameters and Adam's two numbers."""
        return 3 * FLOAT_BYTES * self.model.parameters / self.ranks

    @property
    def _activation_bytes_per_token(self) -> int:
        """Bytes that a block keeps of a token for the backward pass.

        Full: its input. Selective: results of every other product and of attention as well. None,
            d: for each of two
        norms 8 in float32 and 2 not, rotated queries and attention 2 each; k: rotated keys, values
        2 each; f: gate, up, silu, product 2 each.
        """
        model = self.model
        d, k, f = model.width, model.kv_width, model.feedforward
        attention = FLOAT_BYTES * model.heads  # sums of scores
        return {
            "full": COMPUTE_BYTES * d,
            "selective": COMPUTE_BYTES * (d + sum(model.matmul_output_widths[::2]) + d) + attention,
            "none": 24 * d + 4 * k + 8 * f + attention,
        }[self.checkpointing]
