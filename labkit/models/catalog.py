"""The models of the FSDP lab, described without torch, because a launch is checked without it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from labkit.models.protocol import LabModel

ModelName = Literal[
    "toy", "hf_bert", "hf_t5", "transformer", "nested", "nonuniform", "delay", "moe", "mlp_stack",
    "double_linear", "unused_linear", "skip",
]  # fmt: skip


@dataclass(frozen=True)
class ModelEntry:
    """What a model contains, and the ``sizes`` that one may choose, with those of a small model."""

    target: str
    """Module and class in labkit.models."""
    block_types: tuple[str, ...]
    """Class names of the blocks that are wrapped by default."""
    counts: str
    """How many modules of each class are inside, sorted by class."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    paper: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model that it imitates, where these are others."""
    extra: str | None = None
    """Package that it needs beyond labkit's own."""
    takes_numbers: bool = True
    """Whether the input is numbers, which can have a gradient, and not tokens."""

    @cached_property
    def class_counts(self) -> dict[str, int]:
        """The number of modules of each class inside the model, by class name, sorted."""
        return {name: int(count) for name, count in map(str.split, self.counts.split(", "))}


# What Bert and T5 have in common; their counts are those of two layers.
HUGGING_FACE: Any = {"extra": "transformers", "takes_numbers": False,
                     "sizes": {"vocab": 96, "hidden": 32, "layers": 2, "heads": 2,
                               "mlp_ratio": 2, "tokens": 8}}  # fmt: skip
NESTED_COUNTS = "Linear 5, NestedBlock 3, Sequential 1"
MODELS: dict[str, ModelEntry] = {
    "toy": ModelEntry(
        "toy.ToyModel", ("MyModule",), "Linear 12, MyModule 9, ReLU 11, Sequential 10",
        {"hidden": 256, "narrow": 64, "batch": 20}, {"hidden": 10000, "narrow": 1000},
    ),
    "hf_bert": ModelEntry(
        "hf.Bert", ("BertLayer", "BertLMPredictionHead"),
        "BertAttention 2, BertEmbeddings 1, BertEncoder 1, BertForMaskedLM 1, BertIntermediate 2,"
        " BertLMPredictionHead 1, BertLayer 2, BertModel 1, BertOnlyMLMHead 1, BertOutput 2,"
        " BertPredictionHeadTransform 1, BertSelfAttention 2, BertSelfOutput 2, Dropout 7,"
        " Embedding 3, GELUActivation 3, LayerNorm 6, Linear 14, ModuleList 1",
        # BERT-base
        paper={"vocab": 30522, "hidden": 768, "layers": 12, "heads": 12, "mlp_ratio": 4,
               "tokens": 512}, **HUGGING_FACE,
    ),
    "hf_t5": ModelEntry(
        "hf.T5", ("T5Block",),
        "Dropout 16, Embedding 5, Linear 33, ModuleList 6, ReLU 4, T5Attention 6, T5Block 4,"
        " T5DenseActDense 4, T5ForConditionalGeneration 1, T5LayerCrossAttention 2, T5LayerFF 4,"
        " T5LayerNorm 12, T5LayerSelfAttention 4, T5Stack 2",
        # T5-small
        paper={"vocab": 32128, "hidden": 512, "layers": 6, "heads": 8, "mlp_ratio": 4,
               "tokens": 512}, **HUGGING_FACE,
    ),
    "transformer": ModelEntry(
        "transformer.TransformerWithSharedParams",
        ("TransformerEncoderLayer", "TransformerDecoderLayer"),
        "BatchNorm1d 1, Dropout 14, Embedding 1, LayerNorm 12, Linear 9, ModuleList 2,"
        " MultiheadAttention 6, NonDynamicallyQuantizableLinear 6, Transformer 1,"
        " TransformerDecoder 1, TransformerDecoderLayer 2, TransformerEncoder 1,"
        " TransformerEncoderLayer 2",
        takes_numbers=False,
    ),
    "nested": ModelEntry("nested.NestedWrappedModule", ("NestedBlock",), NESTED_COUNTS),
    "nonuniform": ModelEntry("nested.NonUniformReqGradNWM", ("NestedBlock",), NESTED_COUNTS),
    "delay": ModelEntry(
        "delay.NestedWithDelay", ("NestedBlock",),
        "Linear 5, NestedBlock 3, NestedWrappedModule 1, Sequential 1",
        {"delay_after_loss_ms": 0, "delay_before_reduction_ms": 0},
    ),
    "moe": ModelEntry(
        "moe.MixtureOfExperts", ("Shared",), "Expert 1, Linear 2, Sequential 1, Shared 1",
        {"delay_before_free_ms": 0},
    ),
    "mlp_stack": ModelEntry(
        "mlp.MLPStack", ("MLP",), "Linear 6, MLP 3, ModuleList 1",
        {"dim": 16, "batch": 2, "layers": 3},
    ),
    "double_linear": ModelEntry("mlp.DoubleLinear", ("Linear",), "Linear 2", {"dim": 16}),
    "unused_linear": ModelEntry("mlp.UnusedLinear", ("Linear",), "Linear 2", {"dim": 16}),
    "skip": ModelEntry(
        "skip.SkipModel", ("NestedLinear",), "Linear 3, NestedLinear 1, SkipModule 1", {"dim": 10}
    ),
}  # fmt: skip


def check_model(
    model: str,
    block_types: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    **counted: Sequence[int],
) -> ModelEntry:
    """Return the model's entry, if the model can be built here with these blocks and sizes.

    ``counted`` has indices of blocks, by what is done to them: ``skip=(0, 2)``.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    entry = MODELS[model]
    if entry.extra and importlib.util.find_spec(entry.extra) is None:
        others = ", ".join(name for name, other in MODELS.items() if not other.extra)
        fix = f"pip install 'labkit[hf]'; without it: {others}"
        raise ValueError(f"model {model} needs {entry.extra}: {fix}")
    missing = [name for name in block_types if name not in entry.class_counts]
    if missing:
        known = ", ".join(entry.class_counts)
        unknown = ", ".join(missing)
        raise ValueError(f"model {model} has no block of type {unknown}: it has {known}")
    for name, size in (sizes or {}).items():
        _check_size(model, name, size)
    chosen_sizes = {**entry.sizes, **(sizes or {})}
    heads = chosen_sizes.get("heads", 1)
    if rest := chosen_sizes.get("hidden", 0) % heads:
        rule = f"is no multiple of model {model}'s {heads} heads"
        raise ValueError(f"hidden {chosen_sizes['hidden']} {rule}: {rest} over")
    blocks = sum(entry.class_counts[name] for name in set(block_types or entry.block_types))
    # The blocks that are a model's own are as many as its layers, or a multiple.
    if "layers" in entry.sizes and {*block_types} <= {*entry.block_types}:
        blocks = blocks * chosen_sizes["layers"] // entry.sizes["layers"]
    for name, chosen in counted.items():
        if not set(chosen) <= set(range(blocks)):
            last = f"{blocks} blocks, from 0 to {blocks - 1}"
            rule = f"{name} {tuple(chosen)} counts blocks that are not there"
            raise ValueError(f"{rule}: model {model} has {last}")
    return entry


def _check_size(model: str, name: str, size: int) -> None:
    entry = MODELS[model]
    if name not in entry.sizes:
        known = ", ".join(entry.sizes) or "none to choose"
        raise ValueError(f"model {model} has no size {name}: it has {known}")
    # A delay may be 0; every other size is at least 1.
    least = min(1, entry.sizes[name])
    if size < least:
        raise ValueError(f"{name} {size} must be at least {least}")


def create_model(
    model: str, *, seed: int | None = None, expert_seed: int = 0, **sizes: int
) -> LabModel:
    """Build a model, with random weights from the global RNG, which ``seed`` seeds first."""
    entry = check_model(model, sizes=sizes)
    module, _, class_name = entry.target.partition(".")
    chosen: type[LabModel] = getattr(importlib.import_module(f"labkit.models.{module}"), class_name)
    # The catalog itself must not import torch: a launch is checked without it.
    if seed is not None:
        importlib.import_module("torch").manual_seed(seed)
    # Ranks differ only in their expert.
    differs = {"expert_seed": expert_seed} if model == "moe" else {}
    return chosen.build(**{**entry.sizes, **sizes, **differs})
