"""Train Llama 2 with FSDP2 on any number of GPUs.

    torchrun --nproc-per-node 8 launch/given/train.py --batch 2 --checkpointing selective

Its model is that of ``launch/decoder.py``, which also shares matrices and checks its results.
"""

from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit import rank
from labkit.config import PositiveInt
from labkit.parallel.checkpointing import apply_activation_checkpointing
from labkit_simulate.decoder import DecoderModel
from labkit_simulate.theory.transformer import LLAMA_2_7B, TINY_DECODER, DecoderShape


@dataclass
class Config:
    """What is trained, and how the ranks share it."""

    model: Literal["llama_2_7b", "tiny"] = "llama_2_7b"
    """tiny has the same parts and runs on any machine."""
    layers: PositiveInt | None = None
    """Number of blocks; by default the model's own."""
    sequence: PositiveInt = 2048
    """Tokens of a sequence."""
    batch: PositiveInt = 1
    """Sequences of a rank in a step."""
    shard_over: PositiveInt | None = None
    """Neighbouring ranks that share one copy of the model; by default all of them."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, what is cheap, or every block."""
    steps: PositiveInt = 2
    """Timed steps, after one to warm up."""

    ALIKE: ClassVar[str] = "layers"

    def validate(self, world_size: int) -> None:
        if self.shard_over and world_size % self.shard_over:
            rest = f"{world_size} % {self.shard_over} = {world_size % self.shard_over}"
            rule = f"shard_over = {self.shard_over} must divide {world_size} ranks"
            raise ValueError(f"{rule}: {rest}")

    def shape(self) -> DecoderShape:
        """Return the model's shape with this run's number of blocks."""
        whole = TINY_DECODER if self.model == "tiny" else LLAMA_2_7B
        return replace(whole, layers=self.layers or whole.layers)

    def tokens(self) -> int:
        """Return the tokens of a sequence."""
        return self.sequence

    def blocks(self) -> int:
        """Return the number of equal blocks, which ``ALIKE`` names."""
        return self.shape().layers


def main(config: Config) -> None:
    """Shard the model, then train and measure."""
    with rank.session() as here:
        torch.manual_seed(0)
        sizes = asdict(config.shape())
        lab = DecoderModel(**sizes, sequence=config.sequence, batch=config.batch).to(here.device)
        if config.checkpointing != "none":
            selective = config.checkpointing == "selective"
            apply_activation_checkpointing(lab, lab.block_types, selective=selective)

        share = config.shard_over or here.world_size
        groups = {"replicate": here.world_size // share} if share < here.world_size else {}
        mesh = here.mesh(**groups, data=share)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in lab.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(lab, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.Adam(lab.parameters(), lr=1e-4, fused=True)

        for index, step in enumerate(here.steps(config.steps, track=[lab, optimizer])):
            with step.untimed():
                inputs = lab.get_input(here.device, seed=index * here.world_size + here.rank)
            optimizer.zero_grad()
            with step.span("forward"):
                loss = lab.get_loss(inputs, lab(*inputs))
            with step.span("backward"):
                loss.backward()
            with step.span("optimizer"):
                optimizer.step()


if __name__ == "__main__":
    rank.run_main(main, Config)
