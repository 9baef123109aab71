"""labkit.parallel.tensor_parallel through its rank program: one device on 2 x 2 ranks, and refused where it must be."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs.tensor_parallel_cases import CASES, MISSING
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import labkit
from labkit.models.chain import LinearChain
from labkit.models.mlp import MLPStack
from labkit.parallel.fsdp import apply_fsdp2
from labkit.parallel.tensor_parallel import apply_plain_tensor_parallel, apply_tensor_parallel
from labkit.session.traffic import CommunicationCounter

PROGRAM = Path(__file__).parent / "programs" / "tensor_parallel_cases.py"


@pytest.fixture(scope="module")
def two_steps():
    return labkit.run(PROGRAM, nproc=4, device="cpu")


def case_or_skip(name):
    why = MISSING.get(name, "")
    return pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why))


@pytest.mark.parametrize("case", [case_or_skip(name) for name in CASES])
def test_four_ranks_compute_what_one_device_computes(two_steps, case):
    tensors = 4 * 3 + CASES[case].norm
    assert two_steps.value(f"{case} compared") == 2 * (1 + 2 * tensors)
    assert two_steps.value(f"{case} error") < 1e-12  # float64


@pytest.fixture
def four_ranks():
    """This process is the first of four ranks, and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield lambda *names: init_device_mesh("cpu", (2, 2), mesh_dim_names=names or None)
    dist.destroy_process_group()


@pytest.mark.parametrize("names", [(), ("data", "space")])
def test_a_mesh_without_the_two_axes_is_refused(four_ranks, names):
    has = ", ".join(names) or "without names"
    with pytest.raises(ValueError, match=f"the mesh has axes {has}: it needs data and tp"):
        apply_tensor_parallel(MLPStack(8), four_ranks(*names), sequence_parallel=False)


def test_a_width_that_cannot_be_shared_is_refused_with_the_arithmetic(four_ranks):
    with pytest.raises(ValueError, match="4 ranks cannot share the inner width 18: 18 % 4 = 2"):
        apply_tensor_parallel(MLPStack(6), four_ranks("data", "tp"), sequence_parallel=True)


def test_a_width_that_ddp_does_not_cut_is_shared_by_tp_alone(four_ranks):
    model = apply_plain_tensor_parallel(LinearChain(6), four_ranks("data", "tp"))
    assert [tuple(each.shape) for each in model.parameters()] == [(3, 6), (3,), (6, 3), (6,)] * 2
    with pytest.raises(ValueError, match="2 ranks cannot share the inner width 5: 5 % 2 = 1"):
        apply_plain_tensor_parallel(LinearChain(5), four_ranks("data", "tp"))


def on_both_axes(mesh, sequence_parallel, norm=False):
    model = apply_tensor_parallel(MLPStack(8, norm), mesh, sequence_parallel=sequence_parallel)
    apply_fsdp2(model, mesh, block_types=model.block_types)
    return model


def test_tensor_parallelism_alone_leaves_samples_to_others(four_ranks):
    model = apply_tensor_parallel(MLPStack(8), four_ranks("data", "tp"), sequence_parallel=False)
    assert {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()} == {("tp",)}


def test_a_rank_keeps_its_part_of_every_matrix(four_ranks):
    model = on_both_axes(four_ranks("data", "tp"), sequence_parallel=False)
    shapes = {name: tuple(parameter.to_local().shape) for name, parameter in model.layers[0].named_parameters()}
    assert shapes == {
        "in_proj.weight": (6, 8),  # of 24 x 8: rows shared by both axes
        "in_proj.bias": (6,),
        "out_proj.weight": (4, 12),  # of 8 x 24: rows over data, columns over tp
        "out_proj.bias": (4,),
    }


@pytest.mark.parametrize(
    ("sequence_parallel", "norm", "between", "counts"),
    [
        # one all-gather an MLP is FSDP's own, and one the norm's
        (False, False, (2, 8, 8), {"all_gather": 3, "all_reduce": 3}),
        (True, False, (2, 4, 8), {"all_gather": 3 + 3 + 1, "reduce_scatter": 3}),
        (True, True, (2, 4, 8), {"all_gather": 3 + 3 + 1 + 1, "reduce_scatter": 3}),
    ],
)
def test_what_lies_between_the_pairs_and_what_is_sent(four_ranks, sequence_parallel, norm, between, counts):
    model = on_both_axes(four_ranks("data", "tp"), sequence_parallel, norm)
    shapes = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, output: shapes.append(local(output).shape))
    with torch.no_grad(), CommunicationCounter() as counter:
        output = model(torch.zeros(2, 8, 8))
    assert shapes == [between] * 3
    assert output.shape == (2, 8, 8)
    assert dict(counter.counts) == counts


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
