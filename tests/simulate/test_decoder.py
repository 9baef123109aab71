"""labkit_simulate.decoder and launch/decoder: the shapes of theory, and equal to one device on every mesh."""

import json
from types import SimpleNamespace

import pytest
import torch
from fixture_cells import run_cells
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import labkit
from labkit import config
from labkit.launcher.run import find_program
from labkit.parallel.checkpointing import SelectiveCheckpointPolicy, apply_activation_checkpointing
from labkit_simulate.decoder import DecoderModel, apply_decoder_tensor_parallel, apply_rotary, rotary_cos_sin
from labkit_simulate.flop_counter import OperatorCounter
from labkit_simulate.theory import transformer as theory
from launch import decoder

CPU = torch.device("cpu")
ON_TWO = {
    "fsdp": {},
    "bf16": {"precision": "bf16"},
    "tp": {"tp": 2},
    "tp, sequence": {"tp": 2, "seq": True, "precision": "bf16"},
    "replicated": {"wrap": "none"},
}
ON_FOUR = {
    "fsdp": {"checkpointing": "selective"},
    "hybrid": {"hybrid": 2, "checkpointing": "full"},
    "kept": {"wrap": "root", "reshard": False},
    "tp": {"tp": 2, "checkpointing": "full"},
    "tp, sequence": {"tp": 2, "seq": True, "checkpointing": "selective"},
    "tp, hybrid": {"tp": 2, "hybrid": 1},
}
CASES = [(2, name) for name in ON_TWO] + [(4, name) for name in ON_FOUR]


@pytest.fixture(scope="module")
def verdicts():
    """What parity says of every case, by ranks and name: one launch for each number of ranks."""
    found = {}
    for ranks, cases in ((2, ON_TWO), (4, ON_FOUR)):
        results = run_cells("decoder", ranks, [{"check": "parity", "steps": 2} | case for case in cases.values()])
        for name, result in zip(cases, results, strict=True):
            found[ranks, name] = json.loads(result.ranks[0].log().splitlines()[-1])
    return found


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_ranks_compute_what_one_device_computes(verdicts, ranks, name):
    verdict = verdicts[ranks, name]
    short = {2: ON_TWO, 4: ON_FOUR}[ranks][name].get("precision") == "bf16"
    tensors = 2 * 9 + 3
    assert verdict["compared"] == (1 if short else 2) * 2 + 2 * tensors + 1, "losses and logits, gradients, rotations"
    assert verdict["ok"] and verdict["max_rel_error"] <= (2e-2 if short else 1e-5), verdict


@pytest.mark.parametrize("name", decoder.SHAPES)
def test_it_has_as_many_parameters_as_theory_says(name):
    with torch.device("meta"):
        model = decoder.build_model(decoder.Config(model=name, sequence=8), torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == decoder.SHAPES[name][0].parameters


def test_a_token_sees_only_those_before_it():
    model = DecoderModel()
    (tokens,) = model.get_input(CPU)
    later = tokens.clone()
    later[:, 9] = (later[:, 9] + 1) % model.vocab
    same = (model(tokens) == model(later)).all(dim=-1)
    assert same[:, :9].all() and not same[:, 9:].any()


def test_what_two_rotated_tokens_have_in_common_depends_on_how_far_apart_they_are():
    torch.manual_seed(0)
    rotations = torch.view_as_complex(rotary_cos_sin(8, 4))
    query, key = (apply_rotary(torch.randn(4).expand(1, 8, 1, 4), rotations)[0, :, 0] for _ in range(2))  # at 8 places
    scores = query @ key.T
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert scores[0].std() > 0.1, "places differ"


def test_heads_share_keys_and_values():
    torch.manual_seed(0)
    attention = DecoderModel().blocks[0].attention
    rotations, every = torch.view_as_complex(rotary_cos_sin(16, 8)), DecoderModel(kv_heads=4).blocks[0].attention
    with torch.no_grad():
        for mine, theirs in ((attention.query, every.query), (attention.output, every.output)):
            theirs.weight.copy_(mine.weight)
        for mine, theirs in ((attention.key, every.key), (attention.value, every.value)):
            theirs.weight.copy_(mine.weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1))
        x = torch.randn(2, 16, 32)
        torch.testing.assert_close(attention(x, rotations), every(x, rotations))


def test_the_loss_is_that_of_the_next_token():
    model = DecoderModel(vocab=7)
    tokens = torch.tensor([[1, 2, 3]])
    certain = functional.one_hot(torch.tensor([[2, 3, 1]]), 7) * 100.0
    assert model.get_loss((tokens,), certain) < 1e-6 < model.get_loss((tokens,), certain.flip(1))


PRODUCTS = theory.TINY_DECODER.matmul_weights


@pytest.mark.parametrize(
    ("checkpointing", "again"),
    [("none", ()), ("selective", PRODUCTS[1::2]), ("full", PRODUCTS[:-1])],  # as in theory/transformer.py
)
def test_as_much_is_computed_again_as_theory_says(checkpointing, again):
    model = DecoderModel(layers=3)
    if checkpointing != "none":
        apply_activation_checkpointing(model, model.block_types, selective=checkpointing == "selective")
    inputs = model.get_input(CPU)
    loss = model.get_loss(inputs, model(*inputs))
    with OperatorCounter() as counted:
        loss.backward()
    products = [operator.flops for operator in counted.operators if operator.name == "mm"]
    tokens, weights = 2 * 16, 3 * sum(PRODUCTS) + 96 * 32
    assert len(products) == 2 * (3 * 7 + 1) + 3 * len(again)
    assert sum(products) == 2 * tokens * (2 * weights + 3 * sum(again))
    attention = [operator for operator in counted.operators if operator.name.endswith("flash_attention_for_cpu")]
    assert len(attention) == (3 if checkpointing == "full" else 0)


@pytest.mark.parametrize("again", [False, True])
def test_of_a_blocks_products_the_first_and_every_other_one_is_kept(again):
    keep, context = SelectiveCheckpointPolicy(), SimpleNamespace(is_recompute=again)
    assert [keep(context, torch.ops.aten.mm.default).name for _ in range(3)] == [
        *("MUST_SAVE", "PREFER_RECOMPUTE", "MUST_SAVE"),
    ]


def test_a_rank_of_tp_holds_its_share_of_every_matrix(fake_group):
    model = DecoderModel()
    apply_decoder_tensor_parallel(model, fake_group, sequence_parallel=False)
    shapes = {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in model.named_parameters()}
    assert {name.removeprefix("blocks.0."): shape for name, shape in shapes.items() if "blocks.1" not in name} == {
        "embedding.weight": (96, 16),  # each rank some numbers of every word
        "attention_norm.weight": (32,),
        "attention.query.weight": (16, 32),
        "attention.key.weight": (8, 32),
        "attention.value.weight": (8, 32),
        "attention.output.weight": (32, 16),
        "feedforward_norm.weight": (32,),
        "feedforward.gate.weight": (32, 32),
        "feedforward.up.weight": (32, 32),
        "feedforward.down.weight": (32, 32),
        "norm.weight": (32,),
        "output.weight": (48, 32),
    }
    with pytest.raises(ValueError, match="2 ranks cannot share the inner width 3: 3 % 2 = 1"):
        apply_decoder_tensor_parallel(DecoderModel(24, heads=3, kv_heads=3), fake_group, sequence_parallel=False)


@pytest.fixture
def fake_group():
    """A mesh of 1 x 2 ranks, of which this process is the first, and the other does not exist."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "parameters", "message"),
    [
        (6, {"tp": 4}, "6 ranks cannot be cut into lines of tp = 4: it must divide them"),
        (8, {"tp": 2, "hybrid": 8}, "8 ranks are 4 lines of tp = 2, which cannot be cut into groups of hybrid = 8"),
        (4, {"tp": 4}, "4 ranks cannot share kv_heads = 2: 2 % 4 = 2"),
        (16, {"tp": 16, "model": "llama_3_8b"}, "16 ranks cannot share kv_heads = 8: 8 % 16 = 8"),
        (2, {"seq": True}, "seq cuts the sequence over tp, but tp is 1: take 2 or more"),
        (2, {"seq": True, "tp": 2, "sequence": 7}, "2 ranks cannot share a sequence of 7: 7 % 2 = 1"),
        (2, {"wrap": "none", "precision": "bf16"}, "wrap none replicates plain float32 parameters"),
        (2, {"wrap": "none", "tp": 2}, "wrap none replicates plain float32 parameters"),
        (2, {"wrap": "none", "hybrid": 1}, "wrap none replicates plain float32 parameters"),
    ],
)
def test_what_cannot_work_is_refused_with_the_arithmetic(ranks, parameters, message):
    with pytest.raises(labkit.ParameterError) as refused:
        config.build_config(config.read_config(find_program("decoder")[0]), parameters, ranks)
    assert message in str(refused.value)


@pytest.mark.parametrize(("mesh", "sharers"), [({}, 1024), ({"hybrid": 8}, 8), ({"tp": 8}, 1024)], ids=str)
def test_of_a_thousand_ranks_each_holds_its_share_of_seventy_billion(mesh, sharers):
    params = {"model": "llama_3_70b", "layers": 2, "batch": 1, "precision": "bf16", "checkpointing": "full"} | mesh
    result = labkit.simulate("decoder", world_size=1024, steps=2, **params)
    numbers = decoder.Config(**params).decoder_shape().parameters
    assert result.value("peak_parameter_bytes") == pytest.approx(4 * numbers / sharers, rel=0.01)
    assert ("replicate/all_reduce_count" in result.summary()) == ("hybrid" in mesh)
    assert ("tp/all_reduce_count" in result.summary()) == ("tp" in mesh)
    if "tp" in mesh:
        # in a block two sums in the forward pass, of which one is done again, and two in the backward pass
        sums, tokens, width = 2 * (2 + 1 + 2), 8192, 8192
        behind_the_blocks = 1 * 2 * tokens * width + 3 * 4 * tokens  # and of the loss three numbers a token
        assert result.value("tp/all_reduce_bytes") == pytest.approx(
            sums * 2 * tokens * width + behind_the_blocks, abs=16
        )


def parts_from_meta(tp):
    """What a rank holds of a model that no rank has built: is it as if drawn at once?"""
    decoder.SHAPES["llama_2_7b"] = decoder.SHAPES["tiny"]
    config = decoder.Config(model="llama_2_7b", tp=tp)
    assert config.starts_on_meta()
    mesh = init_device_mesh("cpu", (2 // tp, tp), mesh_dim_names=("data", "tp"))
    lab = decoder.build_model(config, torch.device("meta"))
    assert all(each.is_meta for each in [*lab.parameters(), *lab.buffers()])
    _, units = decoder.parallelize_model(config, mesh, lab)
    decoder.fill_model(lab, SimpleNamespace(device=torch.device("cpu"), rank=mesh.get_rank()))
    whole = decoder.build_model(config, torch.device("cpu"))
    assert torch.equal(lab.rotations, whole.rotations)
    ratios = []
    for mine, drawn in zip(lab.parameters(), whole.parameters(), strict=True):
        full = mine.full_tensor()
        assert full.shape == drawn.shape
        halves = [half for dim in range(full.dim()) for half in full.chunk(2, dim)]
        same = [torch.equal(*halves[index : index + 2]) for index in range(0, len(halves), 2)]
        assert full.dim() == 1 or not any(same), "each rank draws numbers of its own"
        ratios.append(float(full.std() / drawn.std()) if full.dim() > 1 else float(full.mean() / drawn.mean()))
    return len(units), min(ratios), max(ratios)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_large_model_is_never_whole_on_a_rank(ranks, tp):
    for units, least, most in ranks(2)(parts_from_meta, tp):
        assert units == 3 and 0.8 < least <= most < 1.2


@pytest.mark.parametrize("how", [{"model": "tiny"}, {"check": "parity"}, {"hybrid": 2}, {"wrap": "none"}])
def test_what_must_be_equal_on_all_ranks_is_built_whole(how):
    assert not decoder.Config(**{"model": "llama_2_7b"} | how).starts_on_meta()
