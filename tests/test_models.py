"""labkit.models of the FSDP lab: sizes as the course gives them, seeds, and objectives that stay alive."""

import copy
import math

import pytest
import torch
from test_catalog import ALL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.models import catalog
from labkit.models.delay import ModuleWithDelay
from labkit.models.mlp import MLP, DoubleLinear, MLPStack
from labkit.models.moe import MixtureOfExperts
from labkit.models.nested import NestedBlock, NestedWrappedModule, NonUniformReqGradNWM
from labkit.models.protocol import LabModel
from labkit.models.skip import NestedLinear, SkipModel, SkipModule
from labkit.models.toy import CustomLinear, MyModule, ToyModel
from labkit.models.transformer import TransformerWithSharedParams
from labkit_simulate.decoder import DecoderModel

CPU = torch.device("cpu")
OTHERS = {  # models that the catalog does not offer
    "transformer without norm": lambda: TransformerWithSharedParams(add_bn=False),
    "moe with delay": lambda: MixtureOfExperts(delay_before_free_ms=1),
    "mlp_stack with norm": lambda: MLPStack(with_layer_norm=True),
    "skip twice": lambda: SkipModel(double_nest=True),
    "delay": lambda: ModuleWithDelay(TransformerWithSharedParams(), 1, 1),
    "decoder": DecoderModel,
}
EVERY = [*ALL, *OTHERS]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For tensors as small as these a second thread is only waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name, seed=0):
    torch.manual_seed(seed)
    return OTHERS[name]() if name in OTHERS else catalog.create_model(name)


def widths(model):
    return [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_alive_after_ten_steps_of_adam(name):
    model = made(name)
    unused = {id(parameter) for module in model.unused_modules() for parameter in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in unused]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    inputs = model.get_input(CPU, seed=1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.get_loss(inputs, model(*inputs))
        model.run_backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert loss.shape == ()
    assert losses[-1] < losses[0]
    assert trained
    assert min(parameter.grad.abs().max().item() for parameter in trained) > 1e-7


@pytest.mark.parametrize("name", ["nested", "transformer"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_a_loss_is_not_computed_in_a_short_type(name, dtype, expected):
    model = made(name)
    inputs = model.get_input(CPU)
    assert model.get_loss(inputs, model(*inputs).to(dtype)).dtype == expected


def test_the_backward_pass_gives_the_gradients_of_the_loss():
    model = made("mlp_stack")
    inputs = model.get_input(CPU)
    output = model(*inputs)
    loss = model.get_loss(inputs, output)
    assert torch.equal(loss, ((output - 1) ** 2).mean())
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    model.run_backward(loss)
    assert all(torch.equal(each.grad, wanted) for each, wanted in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_an_input_depends_on_its_seed_alone(name):
    model = made(name)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (model.get_input(CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state()), "the global RNG is the caller's"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_equal_seeds_build_equal_models(name):
    model, again = made(name, seed=3), made(name, seed=3)
    for (key, value), (other_key, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(value, other)


@pytest.mark.parametrize("name", EVERY)
def test_a_copy_computes_the_same(name):
    model = made(name).eval()
    other = copy.deepcopy(model)
    inputs = model.get_input(CPU)
    assert torch.equal(model.get_loss(inputs, model(*inputs)), other.get_loss(inputs, other(*inputs)))


@pytest.mark.parametrize("name", EVERY)
def test_the_blocks_to_wrap_are_there(name):
    model = made(name)
    assert model.block_types
    assert set(model.block_types) <= {type(module).__name__ for module in model.modules() if module is not model}


def test_a_model_without_an_input_cannot_be_made():
    with pytest.raises(TypeError, match="get_input"):
        LabModel()


def test_toy_has_the_layout_of_the_course_at_any_width():
    model = ToyModel(hidden=32, narrow=8)
    assert widths(model) == [(10, 32), (32, 32), (32, 32), (32, 8), *[(8, 8)] * 7, (8, 5)]
    assert [type(module) for module in model.net[4:-1]] == [MyModule] * 9
    assert model(*model.get_input(CPU)).shape == (20, 5)
    with torch.device("meta"):
        full = ToyModel()
    assert widths(full) == [(10, 10000), *[(10000, 10000)] * 2, (10000, 1000), *[(1000, 1000)] * 7, (1000, 5)]
    parameters = [parameter.numel() for parameter in full.parameters()]
    assert round(sum(parameters) / 1e6) == 217
    assert sum(sorted(parameters)[-3:]) / sum(parameters) == pytest.approx(0.97, abs=0.005)


def test_a_block_of_toy_is_a_linear_layer_and_then_relu():
    block, x = MyModule(6, 4), torch.randn(50, 6)
    layer, relu = block.net
    assert isinstance(relu, nn.ReLU) and torch.equal(block(x), layer(x).clamp(min=0)) and layer(x).min() < 0


def test_custom_linear_is_a_product_and_no_linear_layer():
    layer = CustomLinear(3, 4)
    assert layer.weight.shape == (3, 4)
    assert torch.allclose(layer(torch.eye(3)), layer.weight)
    assert not isinstance(layer, nn.Linear)


def test_transformer_has_the_sizes_of_the_course():
    model = TransformerWithSharedParams()
    assert model.embed_tokens.weight.shape == (23, 16)
    assert model.output_proj.weight is model.embed_tokens.weight
    assert len(model.transformer.encoder.layers) == len(model.transformer.decoder.layers) == 2
    layer = model.transformer.encoder.layers[0]
    assert (layer.linear1.out_features, layer.dropout.p) == (8, 0.1)
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "vocab_bias": torch.float32,
        "long_buffer": torch.int64,
        "norm.running_mean": torch.float32,
        "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
    }
    assert TransformerWithSharedParams(add_bn=False).norm is None
    source, target = model.get_input(CPU)
    assert (source.shape, target.shape) == ((2, 6), (2, 4))
    logits = model(source, target)
    assert logits.shape == (2, 4, 23)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert torch.equal(model.get_loss((source, target), logits), expected)


@pytest.mark.parametrize("name", ["vocab_bias", "long_buffer"])
def test_the_transformer_adds_its_buffers_to_the_source(name):
    model = TransformerWithSharedParams(dropout=0.0)
    source, target = model.get_input(CPU)
    given = []
    model.transformer.register_forward_pre_hook(lambda module, args: given.append(args))
    model(source, target)
    model.get_buffer(name)[0] += 2
    model(source, target)
    (before, target_before), (after, target_after) = given
    assert torch.equal(target_before, target_after)
    assert torch.allclose(after - before, torch.tensor([2.0] + 15 * [0.0]))


def test_the_batch_norm_of_the_transformer_takes_the_samples_for_its_channels():
    model = TransformerWithSharedParams()
    source, target = model.get_input(CPU)
    model(source, target)
    embedded = model.embed_tokens(target)  # [N, T, D]
    assert model.norm.num_batches_tracked == 1
    assert torch.allclose(model.norm.running_mean, 0.1 * embedded.mean(dim=(1, 2)))


def test_dropout_of_the_transformer_follows_the_global_seed():
    model = TransformerWithSharedParams()
    inputs = model.get_input(CPU)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(*inputs))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_nested_has_blocks_inside_blocks():
    model = NestedWrappedModule()
    assert widths(model) == [(8, 4), (4, 16), (16, 16), (16, 4), (4, 8)]
    blocks = {name for name, module in model.named_modules() if isinstance(module, NestedBlock)}
    assert blocks == {"net.1", "net.1.0", "net.2"}


def test_of_the_frozen_model_the_last_layer_alone_needs_gradients_and_shares_its_block():
    model = NonUniformReqGradNWM()
    assert widths(model) == [(8, 4), (4, 16), (16, 16), (16, 4), (4, 8)]
    assert {name for name, module in model.named_modules() if isinstance(module, NestedBlock)} == {
        *("net.1", "net.1.0", "net.2")
    }
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["net.2.1.weight", "net.2.1.bias"]


def test_experts_differ_with_their_seed_and_nothing_else_does():
    def states(expert_seed):
        torch.manual_seed(0)
        model = MixtureOfExperts(expert_seed)
        return model.state_dict(), model(*model.get_input(CPU))

    (first, _), (second, _) = states(1), states(2)
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert differ == {"net.2.weight", "net.2.bias"}
    assert len(first) == 8
    assert widths(MixtureOfExperts()) == [(8, 12), (12, 23), (23, 12), (12, 8)]


def test_the_expert_is_the_only_local_module():
    model = MixtureOfExperts()
    assert model.local_modules() == [model.net[2]]
    assert ModuleWithDelay(model).local_modules() == [model.net[2]]
    unused = DoubleLinear(use_second_linear=False)
    assert ModuleWithDelay(unused).unused_modules() == unused.unused_modules() == [unused.lin2]
    assert NestedWrappedModule().local_modules() == []


def test_an_expert_starts_like_a_linear_layer():
    model = MixtureOfExperts(4)
    bound = 1 / 23**0.5
    for parameter in model.net[2].parameters():
        assert parameter.abs().max() <= bound
    assert model.net[2].weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_mlp_takes_the_arguments_of_the_course():
    mlp = MLP(6)
    assert widths(mlp) == [(6, 24), (24, 6)]
    assert mlp.buffer is None
    x = torch.randn(2, 6)
    assert torch.equal(mlp(x), mlp.out_proj(mlp.in_proj(x).relu()).relu())
    assert all(layer.bias is not None for layer in (mlp.in_proj, mlp.out_proj))
    other = MLP(6, "meta", bias=False, with_buffer=True, dim_multiplier=2)
    assert {name: tuple(value.shape) for name, value in other.state_dict().items()} == {
        "buffer": (6,),
        "in_proj.weight": (12, 6),
        "out_proj.weight": (6, 12),
    }
    assert all(value.is_meta for value in other.state_dict().values())


def test_the_buffer_of_an_mlp_is_added_after_the_last_relu():
    mlp = MLP(4, with_buffer=True)
    x = torch.randn(3, 4)
    with_buffer = mlp(x)
    buffer, mlp.buffer = mlp.buffer, None
    assert torch.equal(with_buffer, mlp(x) + buffer)
    assert mlp(x).min() >= 0


@pytest.mark.parametrize("with_buffer", [True, False])
def test_an_mlp_that_was_built_without_memory_comes_to_life_as_one_that_was_not(with_buffer):
    torch.manual_seed(3)
    expected = MLP(6, with_buffer=with_buffer).state_dict()
    mlp = MLP(6, "meta", with_buffer=with_buffer).to_empty(device="cpu")
    for tensor in mlp.state_dict().values():
        tensor.fill_(math.nan)  # fresh memory often holds zeros
    torch.manual_seed(3)
    mlp.reset_parameters()
    assert mlp.state_dict().keys() == expected.keys() and ("buffer" in expected) is with_buffer
    assert all(torch.equal(tensor, expected[name]) for name, tensor in mlp.state_dict().items())


def mlp_of_two_ranks():
    """Buffer and output of an MLP that was sharded before it had memory, and whether it has gradients."""
    mlp = fully_shard(MLP(8, "meta", with_buffer=True), mesh=init_device_mesh("cpu", (2,)))
    mlp.to_empty(device="cpu")
    for tensor in (*mlp.parameters(), *mlp.buffers()):
        nn.init.constant_(tensor, math.nan)
    torch.manual_seed(3)
    mlp.reset_parameters()
    output = mlp(torch.ones(2, 8))
    output.square().sum().backward()
    alive = [bool(each.grad.to_local().isfinite().all()) for each in mlp.parameters()]
    return mlp.buffer.tolist(), bool(output.isfinite().all()), alive


def test_its_shards_come_to_life_too_and_its_buffer_is_that_of_all_ranks(ranks):
    first, second = ranks(2)(mlp_of_two_ranks)
    assert first == second
    assert len(set(first[0])) == 8 and first[1:] == (True, [True] * 4)


def test_mlp_stack_has_the_multipliers_of_the_course():
    assert widths(MLPStack(5)) == [(5, 15), (15, 5), (5, 20), (20, 5), (5, 15), (15, 5)]
    assert MLPStack().norm is None
    norm = MLPStack(5, with_layer_norm=True).norm
    assert norm.normalized_shape == (5,)
    assert norm.bias is None
    model = MLPStack()
    assert model(*model.get_input(CPU)).shape == (2, 8, 16)


@pytest.mark.parametrize("name", ["toy", "mlp_stack"])
def test_the_batch_is_a_size_of_the_models_that_are_timed(name):
    model = catalog.create_model(name, batch=3)
    (inputs,) = model.get_input(CPU)
    assert len(inputs) == len(model(inputs)) == 3


def test_double_linear_returns_two_results_or_leaves_a_layer_without_gradient():
    both, one = DoubleLinear(), DoubleLinear(use_second_linear=False)
    (x,) = both.get_input(CPU)
    first, second = both(x)
    assert torch.equal(first, both.lin1(x).relu())
    assert torch.equal(second, both.lin2(x).relu())
    for model in (both, one):
        model.run_backward(model.get_loss((x,), model(x)))
    assert both.lin2.weight.grad.any()
    assert one.lin1.weight.grad.any()
    assert one.lin2.weight.grad is None


def test_skip_model_has_one_module_of_each_kind():
    model = SkipModel()
    assert isinstance(model.linear_skip, SkipModule)
    assert [name for name, module in model.named_modules() if isinstance(module, NestedLinear)] == ["nested_linear"]
    twice = SkipModel(double_nest=True)
    nested = [name for name, module in twice.named_modules() if isinstance(module, NestedLinear)]
    assert nested == ["nested_linear", "nested_linear.nested_linear"]
    assert widths(model) == widths(twice) == [(10, 10)] * 3


@pytest.mark.parametrize("name", [case for case in ALL if case.values[0].startswith("hf_")])
def test_models_of_transformers_are_tiny_and_have_no_dropout(name):
    model = made(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e5
    assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))
    inputs = model.get_input(CPU)
    assert model(*inputs).shape == (2, 8, 96)
    assert torch.equal(model(*inputs), model(*inputs))
    assert all(ids.min() >= 0 and ids.max() < 96 for ids in inputs)


@pytest.mark.parametrize("name", [case for case in ALL if case.values[0].startswith("hf_")])
def test_the_papers_sizes_are_those_of_the_published_model(name):
    with torch.device("meta"):
        ours = catalog.create_model(name, **catalog.MODELS[name].paper)
        published = type(ours.model)(type(ours.model.config)())  # whose defaults are BERT-base and T5-small
    shapes, expected = ({key: p.shape for key, p in each.named_parameters()} for each in (ours.model, published))
    # softmax cancels the bias of the keys, so labkit's has none
    assert shapes == {key: shape for key, shape in expected.items() if not key.endswith("self.key.bias")}
    assert round(sum(shape.numel() for shape in shapes.values()) / 1e6, 1) == {"hf_bert": 109.5, "hf_t5": 60.5}[name]
    assert ours.model.config.num_attention_heads == published.config.num_attention_heads
    assert {tuple(ids.shape) for ids in ours.get_input(CPU)} == {(2, 512)}


@pytest.mark.parametrize("name", [case for case in ALL if case.values[0] == "hf_bert"])
def test_bert_ties_its_head_to_its_embeddings(name):
    model = made(name).model
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("name", [case for case in ALL if case.values[0] == "hf_t5"])
def test_the_decoder_of_t5_starts_with_token_0_and_sees_no_token_before_it_predicts_it(name):
    ids, decoder_ids = made(name).get_input(CPU)
    assert not decoder_ids[:, 0].any()
    assert torch.equal(decoder_ids[:, 1:], ids[:, :-1])
    assert ids.all()
