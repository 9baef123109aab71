"""What FSDP's wrappers were told: their attributes, where neither values nor counts show an option. Nothing is sent."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import BatchNorm1d

from labkit.models.mlp import MLP, MLPStack
from labkit.models.nested import NestedWrappedModule
from labkit.parallel import fsdp, fsdp1
from labkit.parallel.checkpointing import apply_activation_checkpointing, checkpoint_wrappers
from labkit.torch_private import checkpoint_wrapper
from launch import fsdp_matrix

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh():
    """Two groups of two ranks, of which this process is the first, and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "data", "alone"))
    dist.destroy_process_group()


def parallelize(mesh, model="mlp_stack", **options):
    """What the program makes of the model; with all ranks of a line, if sharding is not hybrid."""
    config = fsdp_matrix.Config(model=model, **options)
    lab = fsdp_matrix.build_model(config, CPU, 0)
    model, units = fsdp_matrix.parallelize_model(config, mesh if config.hybrid else mesh["data", "alone"], lab)
    return lab, model, units


def fsdp2_group(unit):
    """FSDP2's own record of a unit."""
    return unit._get_fsdp_state()._fsdp_param_group


@pytest.mark.parametrize(
    ("options", "attribute", "value"),
    [
        ({}, "limit_all_gathers", True),
        ({"limit_all_gathers": False}, "limit_all_gathers", False),
        ({}, "forward_prefetch", False),
        ({"forward_prefetch": True}, "forward_prefetch", True),
        ({}, "backward_prefetch", BackwardPrefetch.BACKWARD_PRE),
        ({"backward_prefetch": "post"}, "backward_prefetch", BackwardPrefetch.BACKWARD_POST),
        ({"backward_prefetch": "none"}, "backward_prefetch", None),
        ({}, "_use_orig_params", True),
        ({"use_orig_params": False}, "_use_orig_params", False),
        ({}, "sharding_strategy", ShardingStrategy.FULL_SHARD),
        ({"reshard_after_forward": False}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        ({"hybrid": 2}, "sharding_strategy", ShardingStrategy.HYBRID_SHARD),
        ({"hybrid": 2, "reshard_after_forward": False}, "sharding_strategy", ShardingStrategy._HYBRID_SHARD_ZERO2),
    ],
    ids=str,
)
def test_an_option_of_fsdp1_reaches_every_unit(mesh, options, attribute, value):
    _, _, units = parallelize(mesh, fsdp=1, **options)
    assert list(units) == ["root", "layers.0", "layers.1", "layers.2"]
    assert [getattr(unit, attribute) for (unit,) in units.values()] == [value] * 4


def test_fsdp1_shards_along_data_and_replicates_along_the_other_axis(mesh):
    _, model, _ = parallelize(mesh, fsdp=1, hybrid=2)
    assert model.process_group is mesh["data"].get_group()
    assert model._inter_node_pg is mesh["replicate"].get_group()


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_a_short_type_is_for_parameters_and_not_for_sums(mesh, fsdp, precision, dtype):
    _, _, units = parallelize(mesh, fsdp=fsdp, precision=precision)
    blocks = [modules[0] for name, modules in units.items() if name != "root"]
    policies = [unit.mixed_precision if fsdp == 1 else fsdp2_group(unit).mp_policy for unit in blocks]
    reduce = dtype and torch.float32
    assert [(policy.param_dtype, policy.reduce_dtype) for policy in policies] == [(dtype, reduce)] * 3


def test_a_batch_norm_stays_in_float32(mesh):
    lab, _, _ = parallelize(mesh, "transformer", precision="bf16")
    (norm,) = (module for module in lab.modules() if isinstance(module, BatchNorm1d))
    assert fsdp2_group(norm).mp_policy.param_dtype == torch.float32


@pytest.mark.parametrize("offload", [True, False])
def test_fsdp2_keeps_the_shards_of_every_unit_on_the_host_if_asked(mesh, offload):
    _, _, units = parallelize(mesh, offload=offload)
    for (unit,) in units.values():
        policy = fsdp2_group(unit).offload_policy
        assert isinstance(policy, CPUOffloadPolicy) is offload
        assert not offload or not policy.pin_memory, "which needs a GPU"
        assert {each.offload_to_cpu for each in fsdp2_group(unit).fsdp_params} == {offload}


@pytest.mark.parametrize(("cpu_offload", "told"), [(True, True), (False, None)])
def test_fsdp1_is_told_to_offload(monkeypatch, cpu_offload, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fsdp1, "FullyShardedDataParallel", lambda model, **how: SimpleNamespace(**how))
    given = fsdp1.apply_fsdp1(MLPStack(), block_types=("MLP",), cpu_offload=cpu_offload).cpu_offload
    assert (given and given.offload_params) is told


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_frees_blocks_after_their_forward_pass_if_asked_and_never_the_root(mesh, reshard):
    lab, model, _ = parallelize(mesh, "nested", reshard_after_forward=reshard)
    model(*lab.get_input(CPU))
    freed = {name: not fsdp2_group(unit).is_sharded for name, unit in [("root", model), ("block", lab.net[2])]}
    assert freed == {"root": True, "block": not reshard}, "whether it is still gathered"


def test_fsdp2_shards_along_data_and_replicates_along_the_other_axis(mesh):
    _, _, units = parallelize(mesh, hybrid=2)
    for (unit,) in units.values():
        info = fsdp2_group(unit).mesh_info
        assert info.mesh.mesh_dim_names == ("replicate", "data")
        assert (info.shard_mesh_dim, info.replicate_mesh_dim) == (1, 0)


def test_a_unit_holds_what_the_units_inside_it_have_left(mesh):
    lab, model, _ = parallelize(mesh, "nested")
    units = (model, lab.net[1], lab.net[1][0], lab.net[2])
    assert [len(fsdp2_group(unit).fsdp_params) for unit in units] == [4, 2, 2, 2]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_experts_are_sharded_over_their_own_rank_alone(mesh, fsdp):
    lab, _, units = parallelize(mesh, "moe", fsdp=fsdp)
    if fsdp == 1:
        groups = [unit.process_group.size() for (unit,) in units.values()]
        assert dict(zip(units, groups, strict=True)) == {"root": 2, "net.1": 2, "net.2": 1}
    else:
        assert fsdp2_group(lab.net[2]).mesh_info.mesh.size() == 1
        assert fsdp2_group(lab.net[1]).mesh_info.mesh.size() == 2


@pytest.mark.parametrize("fsdp", [1, 2])
def test_what_is_ignored_stays_plain_and_whole_whatever_its_class(mesh, fsdp):
    _, model, _ = parallelize(mesh, "skip", fsdp=fsdp, ignore=("SkipModule", "NestedLinear"), wrap="layer")
    whole = {name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters() if p.shape == (10, 10)}
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    ignored = {"linear_skip.lin.weight", "nested_linear.nested_linear.weight"}
    assert whole - sharded == ignored
    assert not sharded & ignored and (fsdp == 1 or sharded)


def test_prefetching_gathers_each_block_before_the_one_ahead_computes(mesh):
    lab, _, _ = parallelize(mesh, prefetch=True)
    first, second, last = (block._get_fsdp_state() for block in lab.layers)
    assert first._states_to_forward_prefetch == [second]
    assert second._states_to_forward_prefetch == [last]
    assert all(fsdp2_group(block).unshard_async_op for block in lab.layers)


def test_a_function_may_choose_what_each_block_gathers_ahead(mesh):
    lab, _, _ = parallelize(mesh, prefetch=lambda blocks: blocks[0].set_modules_to_forward_prefetch(blocks[2:]))
    first, second, last = (block._get_fsdp_state() for block in lab.layers)
    assert first._states_to_forward_prefetch == [last] and not second._states_to_forward_prefetch
    assert all(fsdp2_group(block).unshard_async_op for block in lab.layers)


@pytest.mark.parametrize(("ranks", "hybrid", "axes"), [
    (6, 3, {"replicate": 2, "data": 3, "alone": 1}),
    (6, None, {"data": 6, "alone": 1}),
])  # fmt: skip
def test_groups_of_hybrid_sharding_are_as_large_as_it_says(ranks, hybrid, axes):
    here = SimpleNamespace(world_size=ranks, mesh=lambda **asked: asked)
    made = fsdp_matrix.make_mesh(fsdp_matrix.Config(hybrid=hybrid), here)
    assert list(made.items()) == list(axes.items())


@pytest.mark.parametrize("fsdp", [1, 2])
def test_the_blocks_are_units_and_without_a_policy_the_model_is_one(mesh, fsdp):
    assert list(parallelize(mesh, fsdp=fsdp, wrap="root")[2]) == ["root"]
    assert len(parallelize(mesh, fsdp=fsdp, wrap="block")[2]) == 3 + (fsdp == 1)
    how = {"block_types": ("MLP",), "mesh": mesh["data", "alone"]}
    assert list(fsdp1.fsdp1_units(fsdp1.apply_fsdp1(MLPStack(), use_wrap_policy=False, **how))) == ["root"]
    assert len(fsdp1.fsdp1_units(fsdp1.apply_fsdp1(MLPStack(), **how))) == 4


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({"wrap": "root"}, ["root"]),
        ({"wrap": "block"}, ["root", "net.1", "net.1.0", "net.2"]),
        ({"wrap": "block", "blocks": ("Sequential",)}, ["net"]),
        ({"wrap": "layer"}, ["net.0", "net.1.0.0", "net.1.1", "net.2.0", "net.3"]),
        ({"wrap": "every"}, ["net.0", "net.1.0.0", "net.1.1", "net.2.0", "net.3", "net", "net.1", "net.1.0", "net.2"]),
        ({"wrap": "size", "min_numbers": 80}, ["net", "net.1.0.0", "net.1.1"]),
        ({"wrap": "size", "min_numbers": 1000}, ["root"]),
    ],
    ids=str,
)
def test_units_are_those_of_the_policy(mesh, options, units):
    assert set(parallelize(mesh, "nested", **options)[2]) == set(units)


def calls_of_first_layers(model, layers):
    """How often each of these is called in a forward and a backward pass, whose input needs no gradient."""
    calls = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    model(torch.ones(2, 8, 16)).sum().backward()
    return calls


@pytest.mark.parametrize(("use_checkpointing", "calls"), [(True, [2, 2, 2]), (False, [1, 1, 1])])
def test_fsdp1_recomputes_the_blocks_inside_their_units_if_asked(mesh, use_checkpointing, calls):
    model = MLPStack()
    layers = [block.in_proj for block in model.layers]
    how = {"block_types": ("MLP",), "use_checkpointing": use_checkpointing, "mesh": mesh["data", "alone"]}
    wrapper = fsdp1.apply_fsdp1(model, **how)
    inside = checkpoint_wrapper.CheckpointWrapper if use_checkpointing else MLP
    blocks = [unit for name, (unit,) in fsdp1.fsdp1_units(wrapper).items() if name != "root"]
    assert [(type(unit), type(unit._fsdp_wrapped_module)) for unit in blocks] == [
        (FullyShardedDataParallel, inside)
    ] * 3
    assert calls_of_first_layers(wrapper, layers) == calls


def test_checkpointing_recomputes_every_block_once_and_changes_no_gradient():
    torch.manual_seed(0)
    plain, model = MLPStack(), MLPStack()
    model.load_state_dict(plain.state_dict())
    layers = [block.in_proj for block in model.layers]
    assert calls_of_first_layers(plain, [block.in_proj for block in plain.layers]) == [1, 1, 1]
    apply_activation_checkpointing(model, ("MLP",))
    assert calls_of_first_layers(model, layers) == [2, 2, 2]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_block_inside_a_block_is_recomputed_with_it():
    model = NestedWrappedModule()
    assert apply_activation_checkpointing(model, ("NestedBlock",)) == len(checkpoint_wrappers(model)) == 2


def test_tied_weights_make_one_unit_of_two_modules(mesh):
    lab, _, units = parallelize(mesh, "hf_bert")
    head, embeddings = units["model.cls.predictions"]
    assert fsdp2_group(head).modules == (head, embeddings)
    assert lab.model.cls.predictions.decoder.weight is embeddings.weight


def test_a_frozen_block_stays_frozen_and_a_skipped_one_is_the_roots(mesh):
    lab, model, units = parallelize(mesh, freeze=(1,), skip=(2,))
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0", "2"} and list(units) == ["layers.0", "layers.1", "root"]
    assert len(fsdp2_group(lab).fsdp_params) == 4


def test_a_drawn_block_is_one_of_all_and_the_same_for_a_seed():
    drawn = [fsdp.random_block_index(seed, 9) for seed in range(100)]
    assert set(drawn) == set(range(9))
    assert drawn == [fsdp.random_block_index(seed, 9) for seed in range(100)]
