"""Small models with and without tied parameters, and which modules must share an FSDP unit in each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

IDENTITY = "Tied means the same object: compare with `is`, or by id()."
OWN = "A container holds nothing itself, its parts do: see parameters(recurse=False)."
INSIDE = "What is inside the block is in its unit already."
ALL = "Look at every module of the model, and at every parameter of the block, also deep inside."


@dataclass(frozen=True)
class TiedCase:
    """A question to the learner, and its answer.

    Attributes:
        model: the whole.
        block: the part of it that becomes a unit.
        together: what must be in that unit, ``block`` included.
        where: which parameters are tied, for a message that starts with "where".
    """

    model: nn.Module
    block: nn.Module
    together: set[nn.Module]
    where: str

    def hint(self, missing: set[nn.Module], extra: set[nn.Module]) -> str:
        """For an answer that left out some modules, or took in some that do not belong there."""
        if missing:
            return ALL
        if extra & set(self.block.modules()):
            return INSIDE
        if any(next(module.parameters(recurse=False), None) is None for module in extra):
            return OWN
        return IDENTITY


def tied_cases() -> list[TiedCase]:
    """From nothing tied to a tie of three, with pitfalls between."""
    return [nothing(), embedding_and_output(), inside_only(), equal_values(), bias_deep_inside(), three()]


def language_model() -> nn.ModuleDict:
    """An embedding, two blocks of two linear layers, and an output layer as large as the embedding."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    parts = {"embedding": nn.Embedding(6, 4), "blocks": nn.Sequential(*blocks), "output": nn.Linear(4, 6)}
    return nn.ModuleDict(parts)


def tie(first: nn.Module, *others: nn.Module, name: str = "weight") -> None:
    """Make the others hold the first one's parameter."""
    for other in others:
        setattr(other, name, getattr(first, name))


def nothing() -> TiedCase:
    """No tie at all."""
    model = language_model()
    block = model.get_submodule("blocks.0")
    return TiedCase(model, block, {block}, "nothing is tied")


def embedding_and_output() -> TiedCase:
    """The usual tie."""
    model = language_model()
    embedding, output = model.get_submodule("embedding"), model.get_submodule("output")
    tie(embedding, output)
    return TiedCase(model, embedding, {embedding, output}, "the output layer has the embedding's weight")


def inside_only() -> TiedCase:
    """Two layers of one block share a weight: nothing to add."""
    model = language_model()
    block = model.get_submodule("blocks.0")
    tie(block.get_submodule("0"), block.get_submodule("2"))
    return TiedCase(model, block, {block}, "two layers inside the block share a weight")


def equal_values() -> TiedCase:
    """Equal numbers in two parameters."""
    model = language_model()
    embedding, output = model.get_submodule("embedding"), model.get_submodule("output")
    output.load_state_dict(embedding.state_dict(), strict=False)  # copies the weight
    return TiedCase(model, embedding, {embedding}, "the output layer's weight is a copy of the embedding's")


def bias_deep_inside() -> TiedCase:
    """A layer inside the block shares its bias with a layer inside another block."""
    model = language_model()
    block, other = model.get_submodule("blocks.0"), model.get_submodule("blocks.1.0")
    tie(block.get_submodule("2"), other, name="bias")
    return TiedCase(model, block, {block, other}, "a layer inside it shares a bias with another block's")


def three() -> TiedCase:
    """Two more modules hold the weight."""
    model = language_model()
    embedding, output, extra = model.get_submodule("embedding"), model.get_submodule("output"), nn.Linear(4, 6)
    model["heads"] = nn.Sequential(extra)
    tie(embedding, output, extra)
    return TiedCase(model, output, {embedding, output, extra}, "three modules share its weight")
