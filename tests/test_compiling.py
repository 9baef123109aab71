"""labkit.parallel.compiling: blocks compiled in place, with their recomputation; and one order of techniques."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from labkit.models.chain import LinearChain
from labkit.models.mlp import MLPStack
from labkit.models.nested import NestedWrappedModule
from labkit.parallel.checkpointing import apply_activation_checkpointing, checkpoint_wrappers
from labkit.parallel.compiling import apply_compile
from labkit_simulate.decoder import DecoderModel
from launch import decoder, fsdp_matrix, fsdp_wrap, two_dim

TECHNIQUES = (
    "tensor_parallel",
    "plain_tensor_parallel",
    "decoder_tensor_parallel",
    "activation_checkpointing",
    "compile",
    "fsdp",
    "fsdp2",
    "replicate",
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def backward(model):
    """Output and gradients."""
    model.zero_grad()
    output = model(*model.get_input(torch.device("cpu")))
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_keep_their_names_and_compute_the_same(checkpointing):
    torch.manual_seed(0)
    model = MLPStack(8)
    expected, names = backward(model), list(model.state_dict())
    if checkpointing:
        apply_activation_checkpointing(model, ("MLP",))
    named = list(dict(model.named_parameters()))
    assert apply_compile(model, ("MLP",), inductor=False) == 3
    assert list(dict(model.named_parameters())) == named
    assert list(model.state_dict()) == names
    for actual, tensor in zip(backward(model), expected, strict=True):
        torch.testing.assert_close(actual, tensor)
    assert counters["stats"]["unique_graphs"] == 3


def test_what_is_compiled_of_a_checkpointed_block_is_all_of_it(monkeypatch):
    model, compiled = MLPStack(8), []
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled.append(function) or function)
    apply_activation_checkpointing(model, ("MLP",))
    apply_compile(model, ("MLP",))
    assert [function.__self__ for function in compiled] == list(checkpoint_wrappers(model).values())


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled, and how: pairs of a module and options."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: found.append((function.__self__, how)) or function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: found.append((module, how)))
    return found


@pytest.mark.parametrize("blocks", [("MLP",), ()])
def test_inductor_compiles_static_shapes_unless_graphs_are_to_run_as_they_are(compiled, blocks):
    model = MLPStack(8)
    wanted = list(model.layers) if blocks else [model]
    for how, options in (
        ({}, {"backend": "inductor"}),
        ({"inductor": False}, {"backend": "eager"}),
        ({"eager_random": True}, {"backend": "inductor", "options": {"fallback_random": True}}),
    ):
        compiled.clear()
        assert apply_compile(model, blocks, **how) == len(wanted)
        assert compiled == [(each, {"dynamic": False} | options) for each in wanted]


@pytest.mark.long
@pytest.mark.parametrize("inductor", [True, False])
def test_inductor_writes_code_only_if_it_is_to(inductor):
    model = MLPStack(8)
    expected = backward(model)
    apply_compile(model, ("MLP",), inductor=inductor)
    for actual, tensor in zip(backward(model), expected, strict=True):
        torch.testing.assert_close(actual, tensor)
    assert bool(counters["inductor"]) is inductor


@pytest.mark.parametrize(
    ("chosen", "places"),
    [
        ((), ["1", "2"]),
        (("Linear",), ["0", "1.0.0", "1.1", "2.0", "3"]),
        (("Linear", "NestedBlock"), ["0", "1", "2", "3"]),
    ],
)
def test_the_program_compiles_every_chosen_class_or_the_blocks(applied_fsdp, compiled, chosen, places):
    lab = NestedWrappedModule()
    fsdp_matrix.parallelize_model(fsdp_matrix.Config(model="nested", compile=True, compile_only=chosen), None, lab)
    assert [module for module, _ in compiled] == [lab.net.get_submodule(place) for place in places]
    assert all("options" not in how for _, how in compiled)


def test_dropout_of_compiled_code_draws_as_eager_code_does_where_they_are_compared(applied_fsdp, compiled):
    lab = NestedWrappedModule()
    fsdp_matrix.parallelize_model(fsdp_matrix.Config(model="nested", compile=True, check="parity"), None, lab)
    assert [how["options"] for _, how in compiled] == [{"fallback_random": True}] * 2


@pytest.fixture
def applied_fsdp(monkeypatch):
    """No FSDP after compiling."""
    monkeypatch.setattr(fsdp_matrix, "apply_fsdp", lambda model, mesh, **how: (model, {}))


def test_a_block_inside_a_block_is_part_of_it():
    model = NestedWrappedModule()
    assert apply_compile(model, ("NestedBlock",), inductor=False) == 2


def test_without_types_the_whole_model_is_one_graph():
    model = LinearChain(4)
    names = list(model.state_dict())
    assert apply_compile(model, inductor=False) == 1
    backward(model)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names


def test_blocks_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="no block of type Missing in MLPStack"):
        apply_compile(MLPStack(8), ("Missing",))
    with pytest.raises(ValueError, match="no block of type Linear in ReLU"):
        apply_compile(nn.ReLU(), ("Linear",))


class Mesh:
    """Of two ranks on each axis."""

    def __getitem__(self, axis):
        return self

    def size(self):
        return 2


@pytest.fixture
def applied(monkeypatch):
    """What a program applies, in order, instead of applying it."""
    order = []
    for program in (decoder, fsdp_matrix, fsdp_wrap, two_dim):
        for name in TECHNIQUES:
            if hasattr(program, f"apply_{name}"):
                monkeypatch.setattr(program, f"apply_{name}", lambda *args, name=name, **how: order.append(name))
    return order


def test_every_program_applies_techniques_in_one_order(applied):
    fsdp_matrix.parallelize_model(fsdp_matrix.Config(checkpointing=True, compile=True), Mesh(), MLPStack(8))
    assert applied == ["activation_checkpointing", "compile", "fsdp"]
    applied.clear()
    two_dim.parallelize_model(two_dim.Config(checkpointing=True), Mesh(), MLPStack(8), compile=True)
    assert applied == ["tensor_parallel", "activation_checkpointing", "compile", "fsdp2"]
    applied.clear()
    two_dim.parallelize_model(two_dim.Config(plan="ddp_tp"), Mesh(), LinearChain(8), compile=True)
    assert applied == ["plain_tensor_parallel", "replicate", "compile"], "what DDP sends is compiled, too"
    applied.clear()
    decoder.parallelize_model(decoder.Config(tp=2, checkpointing="full"), Mesh(), DecoderModel())
    assert applied == ["decoder_tensor_parallel", "activation_checkpointing", "fsdp"]


def test_only_what_was_asked_for_is_applied(applied):
    fsdp_wrap.parallelize_model(fsdp_wrap.Config(), Mesh(), MLPStack(8))
    two_dim.parallelize_model(two_dim.Config(), Mesh(), MLPStack(8))
    decoder.parallelize_model(decoder.Config(), Mesh(), DecoderModel())
    assert applied == ["fsdp", "tensor_parallel", "fsdp2", "fsdp"]
