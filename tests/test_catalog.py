"""labkit.models.catalog: what it says about a model is what the built model is, and what it refuses."""

import importlib
import importlib.util
import subprocess
import sys
from collections import Counter

import pytest
import torch

from labkit.models import catalog
from labkit.models.protocol import LabModel

WITHOUT_EXTRA = [name for name, entry in catalog.MODELS.items() if not entry.extra]


def needs_extra(name):
    extra = catalog.MODELS[name].extra
    return pytest.mark.skipif(bool(extra) and importlib.util.find_spec(extra) is None, reason=f"{extra} is missing")


ALL = [pytest.param(name, marks=needs_extra(name)) for name in catalog.MODELS]


def test_the_names_are_those_of_the_course():
    assert list(catalog.MODELS) == [
        *("toy", "hf_bert", "hf_t5", "transformer", "nested", "nonuniform", "delay", "moe", "mlp_stack"),
        *("double_linear", "unused_linear", "skip"),
    ]


@pytest.mark.parametrize("name", ALL)
def test_an_entry_says_what_is_in_the_model(name):
    entry, model = catalog.MODELS[name], catalog.create_model(name)
    assert isinstance(model, LabModel)
    assert f"{type(model).__module__}.{type(model).__name__}" == f"labkit.models.{entry.target}"
    assert model.block_types == entry.block_types
    inside = Counter(type(module).__name__ for module in model.modules() if module is not model)
    assert list(entry.class_counts.items()) == sorted(inside.items())
    catalog.check_model(name, entry.block_types)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("toy", ("MyModule",)), ("hf_bert", ("BertLayer", "BertLMPredictionHead")), ("hf_t5", ("T5Block",))],
)
def test_blocks_are_wrapped_by_these_classes(name, blocks):
    module, _, kind = catalog.MODELS[name].target.partition(".")
    built = getattr(importlib.import_module(f"labkit.models.{module}"), kind)
    assert catalog.MODELS[name].block_types == built.block_types == blocks


def test_a_small_model_is_built_unless_sizes_are_given():
    assert catalog.create_model("toy").net[0].out_features == 256
    assert catalog.create_model("toy", hidden=32).net[0].out_features == 32
    assert catalog.create_model("toy", hidden=32, narrow=8).net[-1].in_features == 8


def test_a_seed_and_nothing_else_decides_the_weights():
    def weight(global_seed, **how):
        torch.manual_seed(global_seed)
        return catalog.create_model("nested", **how).net[0].weight

    assert torch.equal(weight(1, seed=3), weight(2, seed=3)) and not torch.equal(weight(1, seed=3), weight(1, seed=4))
    assert not torch.equal(weight(1), weight(2)), "without one, the global RNG does"


def test_the_expert_seed_reaches_the_expert():
    def expert(seed):
        torch.manual_seed(0)
        return catalog.create_model("moe", expert_seed=seed).local_modules()[0].weight

    assert torch.equal(expert(1), expert(1))
    assert not torch.equal(expert(1), expert(2))
    catalog.create_model("nested", expert_seed=3)  # others have no use for it


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: catalog.check_model("resnet"),
            "model 'resnet' is none of toy, hf_bert, hf_t5, transformer, nested, nonuniform, delay, moe, mlp_stack, "
            "double_linear, unused_linear, skip",
        ),
        (
            lambda: catalog.check_model("nested", ["NestedBlock", "MLP", "T5Block"]),
            "model nested has no block of type MLP, T5Block: it has Linear, NestedBlock, Sequential",
        ),
        (
            lambda: catalog.create_model("mlp_stack", width=3),
            "model mlp_stack has no size width: it has dim, batch, layers",
        ),
        (
            lambda: catalog.check_model("hf_t5", sizes={"hidden": 33}),
            "hidden 33 is no multiple of model hf_t5's 2 heads: 1 over",
        ),
        (
            lambda: catalog.check_model("hf_bert", sizes={"heads": 5}),
            "hidden 32 is no multiple of model hf_bert's 5 heads: 2 over",
        ),
        (
            lambda: catalog.check_model("delay", sizes={"delay_after_loss_ms": -1}),
            "delay_after_loss_ms -1 must be at least 0",
        ),
        (
            lambda: catalog.check_model("toy", skip=(0, 8), freeze=(9,)),
            "freeze (9,) counts blocks that are not there: model toy has 9 blocks, from 0 to 8",
        ),
        (
            lambda: catalog.check_model("mlp_stack", sizes={"layers": 2}, freeze=(2,)),
            "freeze (2,) counts blocks that are not there: model mlp_stack has 2 blocks, from 0 to 1",
        ),
        (
            lambda: catalog.check_model("moe", ["Expert", "Shared"], skip=(2,)),
            "skip (2,) counts blocks that are not there: model moe has 2 blocks, from 0 to 1",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["hf_bert", "hf_t5"])
@pytest.mark.parametrize("function", [catalog.check_model, catalog.create_model])
def test_a_missing_extra_is_named_with_the_models_that_do_without(monkeypatch, name, function):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == "transformers" else found(wanted))
    with pytest.raises(ValueError) as caught:
        function(name)
    assert str(caught.value) == (
        f"model {name} needs transformers: pip install 'labkit[hf]'; "
        "without it: toy, transformer, nested, nonuniform, delay, moe, mlp_stack, double_linear, unused_linear, skip"
    )
    for other in WITHOUT_EXTRA:
        catalog.check_model(other)


def test_the_catalog_is_read_and_checked_without_torch_or_transformers():
    code = """
import sys
from labkit.models import catalog
catalog.check_model("toy", ["MyModule"])
catalog.check_model("hf_t5", ["T5Block"]) if catalog.importlib.util.find_spec("transformers") else None
print(*sorted({"torch", "transformers", "numpy"} & sys.modules.keys()), "done")
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout.split() == ["done"], answer.stderr
