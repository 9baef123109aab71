"""The models of the FSDP lab by name. Importing this module does not import torch: it is read before a launch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.models.protocol import LabModel


@dataclass(frozen=True)
class Entry:
    """Where a model is and what is in it."""

    module: str
    """Dotted name of the module that defines it."""
    class_name: str
    """Its class there, a LabModel."""
    block_types: tuple[str, ...]
    """Class names of the blocks that are wrapped by default."""
    classes: tuple[str, ...]
    """Class names of all modules inside, sorted; the model's own is not among them."""
    note: str
    """One line for a person who chooses."""
    extra: str | None = None
    """The optional dependency that it needs, as the name of a package."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What a caller may choose, by the names of the constructor's arguments, and by default: a small model."""


MODELS: dict[str, Entry] = {
    "toy": Entry(
        "labkit.models.toy",
        "ToyModel",
        ("MyModule",),
        ("Linear", "MyModule", "ReLU", "Sequential"),
        "a long chain of Linear and ReLU",
        sizes={"hidden": 256, "narrow": 64, "batch": 20},
    ),
    "hf_bert": Entry(
        "labkit.models.hf",
        "Bert",
        ("BertLayer", "BertLMPredictionHead"),
        (
            "BertAttention",
            "BertEmbeddings",
            "BertEncoder",
            "BertForMaskedLM",
            "BertIntermediate",
            "BertLMPredictionHead",
            "BertLayer",
            "BertModel",
            "BertOnlyMLMHead",
            "BertOutput",
            "BertPredictionHeadTransform",
            "BertSelfAttention",
            "BertSelfOutput",
            "Dropout",
            "Embedding",
            "GELUActivation",
            "LayerNorm",
            "Linear",
            "ModuleList",
        ),
        "a tiny BERT with random weights, from transformers; word embeddings and prediction head share a weight",
        extra="transformers",
    ),
    "hf_t5": Entry(
        "labkit.models.hf",
        "T5",
        ("T5Block",),
        (
            "Dropout",
            "Embedding",
            "Linear",
            "ModuleList",
            "ReLU",
            "T5Attention",
            "T5Block",
            "T5DenseActDense",
            "T5ForConditionalGeneration",
            "T5LayerCrossAttention",
            "T5LayerFF",
            "T5LayerNorm",
            "T5LayerSelfAttention",
            "T5Stack",
        ),
        "a tiny T5 with random weights, from transformers",
        extra="transformers",
    ),
    "transformer": Entry(
        "labkit.models.transformer",
        "TransformerWithSharedParams",
        ("TransformerEncoderLayer", "TransformerDecoderLayer"),
        (
            "Dropout",
            "Embedding",
            "LayerNorm",
            "Linear",
            "ModuleList",
            "MultiheadAttention",
            "NonDynamicallyQuantizableLinear",
            "Transformer",
            "TransformerDecoder",
            "TransformerDecoderLayer",
            "TransformerEncoder",
            "TransformerEncoderLayer",
        ),
        "encoder and decoder whose output layer shares the embedding's weight",
    ),
    "nested": Entry(
        "labkit.models.nested",
        "NestedWrappedModule",
        ("NestedBlock",),
        ("Linear", "NestedBlock", "Sequential"),
        "linear layers in blocks that lie inside blocks",
    ),
    "moe": Entry(
        "labkit.models.moe",
        "MixtureOfExperts",
        ("Shared",),
        ("Expert", "Linear", "Sequential", "Shared"),
        "a shared part, and an expert that every rank has for itself",
    ),
    "mlp_stack": Entry(
        "labkit.models.mlp",
        "MLPStack",
        ("MLP",),
        ("Linear", "MLP", "ModuleList"),
        "three multilayer perceptrons in a row",
        sizes={"dim": 16, "batch": 2},
    ),
}


def check(model: str, block_types: Sequence[str] = (), sizes: Mapping[str, int] | None = None) -> None:
    """Raise ValueError, in one line, where ``model`` cannot be built here, or has no such block or no such size."""
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    entry = MODELS[model]
    if entry.extra and importlib.util.find_spec(entry.extra) is None:
        others = ", ".join(name for name, other in MODELS.items() if not other.extra)
        raise ValueError(f"model {model} needs {entry.extra}: pip install 'labkit[hf]'; without it: {others}")
    missing = [name for name in block_types if name not in entry.classes]
    if missing:
        raise ValueError(f"model {model} has no block of type {', '.join(missing)}: it has {', '.join(entry.classes)}")
    for name, size in (sizes or {}).items():
        if name not in entry.sizes:
            raise ValueError(f"model {model} has no size {name}: it has {', '.join(entry.sizes) or 'none to choose'}")
        if size < 1:
            raise ValueError(f"{name} {size} must be at least 1")


def build(model: str, *, seed: int | None = None, expert_seed: int = 0, **sizes: int) -> LabModel:
    """A model by name, with random weights from the global RNG.

    Args:
        model: a key of ``MODELS``.
        seed: of the global RNG, set first; by default it goes on from where it is.
        expert_seed: seed of the part that differs from rank to rank; only ``moe`` has one.
        sizes: those of ``Entry.sizes`` that shall differ.

    Raises:
        ValueError: see ``check``.
    """
    check(model, sizes=sizes)
    entry = MODELS[model]
    chosen: type[LabModel] = getattr(importlib.import_module(entry.module), entry.class_name)
    if seed is not None:
        importlib.import_module("torch").manual_seed(seed)
    differs = {"expert_seed": expert_seed} if "expert_seed" in inspect.signature(chosen).parameters else {}
    return chosen.build(**{**entry.sizes, **sizes, **differs})
