"""Estimate a training step of a decoder such as Llama under FSDP from its shape.

    setup = TrainingSetup(LLAMA_3_8B, batch=2, sequence=8192, ranks=128)
    step = setup.estimate_step(get_hardware("h100-8x"))
    step.tokens_per_s, step.memory_bytes

A token takes 2 FLOPs per weight in the forward pass and 4 in the backward pass (Kaplan et al.,
2020, arXiv:2001.08361). Attention takes 4 x sequence x width a block, half of it if causal, and 2.5
times as much in the backward pass (Dao, "FlashAttention-2", 2023, arXiv:2307.08691, section 3.1).

Other operators move bytes. They are counted operator by operator for a common block, with 2-byte
elements and norms and rotations in float32. ``COMPILER_BLOCK_BYTES`` remain if a compiler fuses
neighbouring operators.

Letters: d width, k width of keys and values, f of the feedforward part.
"""

import math
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

# Bytes of an element in computation and gathers, and in storage, updates and reductions.
COMPUTE_BYTES, FLOAT_BYTES = 2, 4
ATTENTION_BACKWARD = 2.5
# Moved per parameter by an update: read p, g, m, v; write p, m, v; and clip gradients.
ADAM_BYTES = 40
# Bytes moved by a block's other operators in the forward pass, per element of that width. Eager,
# d: two norms of 36 (to float32 6, square 8, mean 4, times its root 8, back 6, times weight 4),
# rotated queries 20 (to float32 6, complex product 8, back 6), keys and values for all heads 4,
# heads side by side 4, two sums of 6. k: rotated keys 20, keys and values read 4. f: silu 4, times
# the other half 6. Fused, d: two norms with the sum before them of 8, rotated queries 4, heads 8.
# k: rotated keys 4, keys and values read 4. f: silu and product at once 6.
EAGER_BLOCK_BYTES, COMPILER_BLOCK_BYTES = {"d": 112, "k": 24, "f": 10}, {"d": 28, "k": 8, "f": 6}


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder; ``width`` is d, ``feedforward`` is f, ``layers`` counts blocks."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    feedforward: int
    vocab: int

    @property
    def kv_width(self) -> int:
        """Width of keys and values, k."""
        return self.width // self.heads * self.kv_heads

    @property
    def matmul_weights(self) -> tuple[int, ...]:
        """Weights of a block's matrix products: query, key, value, output, gate, up, down."""
        d, k, f = self.width, self.kv_width, self.feedforward
        return d * d, d * k, d * k, d * d, d * f, d * f, f * d

    @property
    def matmul_output_widths(self) -> tuple[int, ...]:
        """Output elements of each matrix product per token."""
        d, k, f = self.width, self.kv_width, self.feedforward
        return d, k, k, d, f, f, d

    @property
    def block_parameters(self) -> int:
        """Parameters of a block with its norms."""
        return sum(self.matmul_weights) + 2 * self.width

    @property
    def root_parameters(self) -> int:
        """Parameters of embedding, last norm and output layer."""
        return 2 * self.vocab * self.width + self.width

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.block_parameters + self.root_parameters

    def model_flops(self, sequence: int) -> float:
        """Return the FLOPs of training per token: without recomputation, attention in full."""
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
LLAMA_2_34B = DecoderShape(
    width=8192, layers=48, heads=64, kv_heads=8, feedforward=22016, vocab=32000
)
LLAMA_2_70B = DecoderShape(
    width=8192, layers=80, heads=64, kv_heads=8, feedforward=28672, vocab=32000
)
TINY_DECODER = DecoderShape(width=32, layers=2, heads=4, kv_heads=2, feedforward=64, vocab=96)
"""For any machine."""

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class StepEstimate:
    """Estimates of a step per rank; ``model_flops_share`` is MFU, ``memory_bytes`` the peak."""

    time: StepTime
    tokens_per_s: float
    model_flops_share: float
    memory_bytes: float


@dataclass(frozen=True)
class TrainingSetup:
    """Training with FSDP, a unit per block, the rest in the root unit; Adam.

    Attributes:
        model: its shape.
        batch: sequences of a rank in a step.
        sequence: tokens of a sequence.
        ranks: number of ranks.
        checkpointing: ``full`` recomputes every block in the backward pass, ``selective`` all but
            attention and every other product, as torchtitan does.
        compiled: whether a compiler fuses neighbouring operators.
        dtype: of the computation.
        shard_ranks: neighbouring ranks over which the model is sharded, by default all; with fewer,
            gradients are then summed over the groups (HSDP), on a stream of their own.
        last_regathered: whether the last block, too, is gathered again for the backward pass, as
            ``fully_shard`` does unless told not to.
    """

    model: DecoderShape
    batch: int
    sequence: int
    ranks: int
    checkpointing: Checkpointing = "selective"
    compiled: bool = False
    dtype: str = "bfloat16"
    shard_ranks: int | None = None
    last_regathered: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.batch * self.sequence

    @property
    def shards(self) -> int:
        """Number of parts into which the model is sharded."""
        return self.shard_ranks or self.ranks

    def estimate_step(self, hosts: Hardware) -> StepEstimate:
        """Estimate a step on the fewest hosts; raise ValueError if ranks do not fill them."""
        on_host = min(self.ranks, hosts.devices)
        if rest := self.ranks % on_host:
            rule = f"{self.ranks} % {on_host} = {rest}"
            raise ValueError(f"{self.ranks} ranks do not fill hosts of {on_host}: {rule}")
        time = self._step_time(hosts.for_rank(on_host), self.ranks // on_host)
        flops = self.tokens * self.model.model_flops(self.sequence)
        return StepEstimate(
            time=time,
            tokens_per_s=self.tokens / time.step_s,
            model_flops_share=time.model_flops_share(flops, hosts.peak_flops_per_s(self.dtype)),
            memory_bytes=self.peak_memory_bytes(),
        )

    def _step_time(self, rank: Hardware, hosts: int) -> StepTime:
        model, copies = self.model, self.ranks // self.shards
        update_s = operator_s(
            Operator("adam", moved_bytes=ADAM_BYTES * model.parameters / self.shards), rank
        )
        groups = Group(self.shards, math.ceil(hosts / copies)), Group(copies, min(copies, hosts))
        root = self._unit_times("root", model.root_parameters, [], [], rank, groups)
        head = self.head_times(rank)
        blocks = [
            self._unit_times(
                f"block {index}", model.block_parameters, *self.block_operators(), rank, groups
            )
            for index in range(model.layers)
        ]
        # The backward pass begins with the last block, which may still be gathered.
        blocks[-1] = replace(blocks[-1], regathered=self.last_regathered)
        units = [replace(root, regathered=False), *blocks, head]
        return schedule_tasks(fsdp_tasks(units, update_s=update_s), overlaps=not rank.shared)

    def _unit_times(
        self,
        name: str,
        parameters: int,
        forward: list[Operator],
        backward: list[Operator],
        rank: Hardware,
        groups: tuple[Group, Group],
    ) -> UnitTimes:
        """Return a unit's times, with its copies out of the gather and into the reduce-scatter.

        Groups are those of a rank that shard the model and that hold the same shard.
        """
        sharing, same = groups
        copy_out = Operator("copy", moved_bytes=2 * COMPUTE_BYTES * parameters)
        copy_in = Operator("copy", moved_bytes=6 * parameters)
        shard = parameters / self.shards
        return UnitTimes(
            name=name,
            gather_s=collective_s("all_gather", COMPUTE_BYTES * shard, sharing, rank),
            forward_s=sum(operator_s(each, rank) for each in [*forward, copy_out]),
            backward_s=sum(operator_s(each, rank) for each in [*backward, copy_out, copy_in]),
            reduce_s=collective_s("reduce_scatter", FLOAT_BYTES * parameters, sharing, rank),
            replicate_s=collective_s("all_reduce", FLOAT_BYTES * shard, same, rank),
        )

    def block_operators(self) -> tuple[list[Operator], list[Operator]]:
        """Return the operators of a block's forward pass, and of backward with recomputation."""
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
            # The output of the last product is not needed for the backward pass.
            "full": [*products[:-1], attention, others],
        }[self.checkpointing]
        backward = [
            *again,
            *(each for each in products for _ in range(2)),
            replace(attention, flops=ATTENTION_BACKWARD * attention.flops),
            replace(others, moved_bytes=2 * others.moved_bytes),
        ]
        return [*products, attention, others], backward

    def head_times(self, rank: Hardware) -> UnitTimes:
        """Return the times of output layer and loss, whose parameters are gathered already."""
        numbers = self.tokens * self.model.vocab
        product = self._matmul_operator(self.model.vocab * self.model.width)
        # Forward: to float32, log-softmax. Backward: loss, log-softmax, back from float32.
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
        """Return the peak of a rank's tensors: the largest of four moments that can hold it.

        They are the loss, SwiGLU's gradients or all gradients of a block in the backward pass, and
        the end, when the root's gradients are reduced. At the loss the last block is taken to stay
        gathered, though ``launch/decoder.py`` gathers it again.

        Attention keeps only the sums of its scores; the optimizer updates in place. Counted
        operator by operator in simulations of ``launch/decoder.py``.
        """
        last = self.model.layers - 1
        backward = [
            self._bytes_in_backward(block) for block in {last, max(0, last - 1), min(1, last), 0}
        ]
        return max(self._bytes_at_loss(), *backward, self._bytes_at_end())

    def _bytes_at_loss(self) -> float:
        """Return the bytes when the loss's gradient has just been computed.

        Shards in float32 with Adam's state; saved activations of the blocks, and of the last norm
        twice in float32 and once not; log-softmax, its gradient and the logits' gradient in
        float32; the gathered root and last block.
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
        """Return the bytes in a block's backward pass, at SwiGLU's gradient or at its end.

        Shards, also of the gradients of later blocks; the next block's gradients in float32, which
        are being reduced; saved activations of earlier blocks; gathered root, this block and the
        previous one; the output layer's gradient; the block's own temporary tensors.
        """
        model = self.model
        behind = model.layers - 1 - block
        d, k, f = model.width, model.kv_width, model.feedforward
        norms = {"none": 26, "full": 28, "selective": 30}[self.checkpointing] * d
        others = 4 * k + 12 * f + FLOAT_BYTES * model.heads
        return (
            self._shard_bytes
            + FLOAT_BYTES * model.block_parameters * behind / self.shards
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
        """Return the bytes when the root's gradients are reduced, from a copy in float32."""
        model = self.model
        reduced = FLOAT_BYTES * model.layers * model.block_parameters / self.shards
        return self._shard_bytes + reduced + (COMPUTE_BYTES + FLOAT_BYTES) * model.root_parameters

    @property
    def _shard_bytes(self) -> float:
        """Shards of parameters and Adam's state."""
        return 3 * FLOAT_BYTES * self.model.parameters / self.shards

    @property
    def _activation_bytes_per_token(self) -> int:
        """Bytes that a block saves per token for the backward pass.

        Full: its input. Selective: also the outputs of every other product and of attention. None,
        d: for each of two norms 8 in float32 and 2 not, rotated queries and attention 2 each; k:
        rotated keys and values 2 each; f: gate, up, silu and product 2 each.
        """
        model = self.model
        d, k, f = model.width, model.kv_width, model.feedforward
        attention = FLOAT_BYTES * model.heads  # sums of scores
        return {
            "full": COMPUTE_BYTES * d,
            "selective": COMPUTE_BYTES * (d + sum(model.matmul_output_widths[::2]) + d) + attention,
            "none": 24 * d + 4 * k + 8 * f + attention,
        }[self.checkpointing]
