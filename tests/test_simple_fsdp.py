"""labkit.parallel.simple_fsdp and launch/simple_fsdp: equal to one device, and joined as theory counts."""

import pytest
import torch
import torch.distributed as dist
from fixture_long import long_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit.models.mlp import MLPStack
from labkit.parallel.simple_fsdp import apply_simple_fsdp, bucket_collectives
from labkit.theory.fsdp import count_joined

pytestmark = pytest.mark.timeout(300)
DIM, LAYERS, MIB = 32, 2, 2**20


class Odd(nn.Module):
    """What a plain layer has not: a shared weight, a number without dimensions, a frozen parameter, rows 3 ranks cannot
    share evenly.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x):
        return self.second(self.first(x).relu()) * self.scale + self.shift.sum()


def odd_gradients():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole, sharded = Odd(), Odd()
    sharded.load_state_dict(whole.state_dict())
    apply_simple_fsdp(sharded, init_device_mesh("cpu", (ranks,)))
    samples = torch.randn(ranks, 4, 5)
    sharded(samples[rank]).square().mean().backward()
    whole(samples.flatten(0, 1)).square().mean().backward()
    assert type(sharded.first.weight) is torch.Tensor and sharded.first.weight.shape == (5, 5), "reading gathers"
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert not sharded.shift.requires_grad
    held = sharded.first._parameters["weight"].to_local().numel()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    apart = 0.0
    for name, parameter in sharded.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None
        else:
            apart = max(apart, float((parameter.grad.full_tensor() - expected[name]).abs().max()))
    return held, apart


def test_gradients_are_one_devices_for_parameters_of_every_kind(ranks):
    found = ranks(3)(odd_gradients)
    assert [held for held, _ in found] == [10, 10, 5], "rows of 5 x 5 on 3 ranks"
    assert max(apart for _, apart in found) < 1e-5


MODELS = {"mlp_stack": {}, "hf_bert": {"layers": 1}}
DAILY = [("mlp_stack", 2, False), ("mlp_stack", 2, True)]
CASES = [(model, nproc, compiled) for model in MODELS for nproc in (2, 4) for compiled in (False, True)]


@pytest.mark.parametrize(("model", "nproc", "compiled"), long_but(DAILY, CASES))
def test_a_model_trains_as_on_one_device(model, nproc, compiled):
    how = {"model": model, "compile": compiled, "steps": 2} | MODELS[model]
    result = labkit.check("simple_fsdp", nproc=nproc, timeout_s=280, **how)
    assert result.ok, result.verdict_text
    assert result.verdict["max_rel_error"] <= 1e-6


@pytest.mark.long
def test_ranks_with_other_rows_do_not_take_each_others_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    how = {"nproc": 3, "compile": True, "dim": 4, "layers": 1, "steps": 1, "timeout_s": 100}
    # The first run fills the caches. Of 4 rows, the third rank has none.
    assert all(labkit.check("simple_fsdp", **how).ok for _ in range(2))


@pytest.mark.long
def test_joined_collectives_train_as_on_one_device():
    result = labkit.check("simple_fsdp", compile=True, bucket_mb=0.01, dim=DIM, steps=2, timeout_s=280)
    assert result.ok and result.verdict["max_rel_error"] <= 1e-6


@pytest.mark.parametrize("bucket_mb", long_but([None, 0.02], [None, 0.0001, 0.01, 0.02, 0.04, 100.0]))
def test_a_step_makes_as_many_collectives_as_theory_joins(bucket_mb):
    result = labkit.run(
        "simple_fsdp", nproc=2, compile=True, bucket_mb=bucket_mb, dim=DIM, layers=LAYERS, steps=1, timeout_s=280
    )
    sizes = [4 * elements for elements in parameter_elements()]
    limit = 0 if bucket_mb is None else bucket_mb * MIB
    assert result.value("all_gather_count") == count_joined(sizes, limit)
    # In the backward pass the last parameters come first.
    assert result.value("reduce_scatter_count") == count_joined(sizes[::-1], limit)
    assert result.value("all_gather_bytes") == sum(sizes) / 2, "each rank hands in its half, once"


def parameter_elements():
    """Of mlp_stack, in the order in which the forward pass reads them."""
    return [parameter.numel() for parameter in MLPStack(dim=DIM, batch=1, layers=LAYERS).parameters()]


def test_a_bucket_is_closed_before_it_would_be_too_large():
    assert [count_joined([3, 3, 3, 8], limit) for limit in (0, 3, 6, 9, 17)] == [4, 4, 3, 2, 1]
    assert count_joined([], 5) == 0


def test_inductors_settings_are_as_before_after_the_block():
    from torch._inductor import config

    with bucket_collectives(3.5):
        assert config.bucket_all_gathers_fx == config.bucket_reduce_scatters_fx == "all"
        assert config.bucket_all_gathers_fx_bucket_size_determinator(7) == 3.5
    assert config.bucket_all_gathers_fx == config.bucket_reduce_scatters_fx == "none"


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"bucket_mb": 1.0}, "bucket_mb joins what a compiled graph sends: use compile as well"),
        ({"model": "moe"}, "model moe has parameters that differ from rank to rank"),
        ({"compile": True, "bucket_mb": 0.0}, "bucket_mb = 0.0 is not float > 0"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(params, told):
    with pytest.raises(labkit.ParameterError, match=told):
        labkit.run("simple_fsdp", **params)
