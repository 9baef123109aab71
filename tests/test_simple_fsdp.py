"""SimpleFSDP and passes over its graphs: equal to one device, and joined as theory counts."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from fixture_long import long_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

import labkit
from labkit import Emulated, requirements
from labkit.models.mlp import MLPStack
from labkit.parallel import graph_passes
from labkit.parallel import simple_fsdp as labkits
from labkit.parallel.buckets import assign_buckets
from labkit.parallel.simple_fsdp import apply_simple_fsdp
from labkit.theory.emulated_steps import gather_hardware

pytestmark = pytest.mark.timeout(300)
DIM, LAYERS, MIB = 32, 2, 2**20
SIZES_MB = [0.0001, 0.01, 0.02, 0.04, 0.1, 100.0]


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
WAYS = {
    "eager": {},
    "compiled": {"compile": True},
    "passes": {"compile": True, "bucketing": "passes", "bucket_mb": 0.01},
    "inductor": {"compile": True, "bucketing": "inductor"},
}
DAILY = [("mlp_stack", 2, "eager"), ("mlp_stack", 2, "passes")]
CASES = [(model, nproc, way) for model, nproc in (("mlp_stack", 2), ("mlp_stack", 4), ("hf_bert", 4)) for way in WAYS]


@pytest.mark.parametrize(("model", "nproc", "way"), long_but(DAILY, CASES))
def test_a_model_trains_as_on_one_device(model, nproc, way):
    how = {"model": model, "steps": 2} | MODELS[model] | WAYS[way]
    result = labkit.check("simple_fsdp", nproc=nproc, timeout_s=280, **how)
    assert result.ok, result.verdict_text
    assert result.verdict["max_rel_error"] <= 1e-6


@pytest.mark.long
def test_ranks_with_other_rows_do_not_take_each_others_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    how = {"nproc": 3, "compile": True, "dim": 4, "layers": 1, "steps": 1, "timeout_s": 100}
    # The first run fills the caches. Of 4 rows, the third rank has none.
    assert all(labkit.check("simple_fsdp", **how).ok for _ in range(2))


@pytest.mark.parametrize("bucket_mb", long_but([0.02], [None, *SIZES_MB]))
def test_a_step_gathers_as_often_as_the_buckets_are_many(bucket_mb):
    how = {"dim": DIM, "layers": LAYERS, "steps": 1, "timeout_s": 280}
    result = labkit.run("simple_fsdp", nproc=2, compile=True, bucketing="passes", bucket_mb=bucket_mb, **how)
    sizes = [4 * elements for elements in parameter_elements()]
    buckets = assign_buckets(sizes, round((bucket_mb or 0) * MIB))
    assert result.value("all_gather_count") == len(buckets)
    assert result.value("all_gather_bytes") == sum(sizes) / 2, "each rank hands in its half, once"
    assert result.value("reduce_scatter_count") == len(sizes)
    order = json.loads(result.ranks[0].artifact("graphs"))
    assert order["forward"].count("gather") == order["forward"].count("wait") == len(buckets)
    # The next gather starts before the graph waits for the one before it.
    assert order["forward"][:2] == (["gather", "gather"] if len(buckets) > 1 else ["gather", "wait"])
    assert order["backward"][-len(sizes) :] == ["wait"] * len(sizes)
    nodes = json.loads(result.ranks[0].artifact("nodes"))["forward"]
    assert all(re.fullmatch(r"\w+ = \w+\([\w, ]*\)", node) for node in nodes), nodes
    assert sum(" = all_gather_into_tensor(" in node for node in nodes) == len(buckets)
    assert sum(" = addmm(" in node for node in nodes) == len(sizes) / 2, "a layer has a weight and a bias"


def shard_with_checkpoints(model, mesh):
    plain = labkits.gather
    labkits.gather = lambda rows: checkpoint(plain, rows, use_reentrant=False)
    apply_simple_fsdp(model, mesh)


@pytest.mark.parametrize(("nproc", "emulate"), long_but([(2, True)], [(2, True), (2, False), (3, False)]))
def test_checkpointed_gathers_lower_the_peak_to_what_theory_counts_and_change_no_number(nproc, emulate):
    dim, layers = 120, 8
    how = {"model": "chain", "dim": dim, "layers": layers, "compile": True, "steps": 2, "timeout_s": 280}
    # At its peak a rank holds a gradient, gloo's copy and its rows of all gradients so far. With kept weights that is
    # at the last layer, beside all but its own and the first one's.
    ways = {
        "kept": ({}, layers - 2 + 2 + 1 / nproc, 0),
        "checkpointed": ({"use": {"simple_fsdp": shard_with_checkpoints}}, 2 + layers / nproc, layers - 1),
    }
    for name, (use, weights, gathers) in ways.items():
        result = labkit.check("simple_fsdp", nproc=nproc, emulate=Emulated() if emulate else None, **use, **how)
        assert result.ok, name
        assert result.value("step_peak_bytes") / (4 * dim**2) == pytest.approx(weights, rel=0.02), name
        assert json.loads(result.ranks[0].artifact("graphs"))["backward"].count("gather") == gathers, name


def parameter_elements():
    """Of mlp_stack, in the order in which the forward pass reads them."""
    return [parameter.numel() for parameter in MLPStack(dim=DIM, batch=1, layers=LAYERS).parameters()]


SHAPES = [(4, 3), (2,), (6, 1, 2), (2, 5)]


def gathers_graph(ranks):
    """A graph that gathers rows of these shapes, of each of which it needs the tensor before."""
    graph = Graph()
    rows = [graph.placeholder(f"rows{place}") for place in range(len(SHAPES))]
    wholes = []
    for row, shape in zip(rows, SHAPES, strict=True):
        row.meta["val"] = torch.empty(shape, device="meta")
        gather = graph.call_function(graph_passes.GATHER, (row, ranks, dist.group.WORLD.group_name))
        whole = graph.call_function(graph_passes.WAIT, (gather,))
        wholes.append(graph.call_function(torch.relu, (whole,)))
    graph.output(tuple(wholes))
    return graph


def changed_graphs(bucket_bytes):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    graph = gathers_graph(ranks)
    graph_passes.join_gathers(graph, bucket_bytes)
    graph_passes.raise_inputs(graph)
    graph_passes.start_early(graph)
    graph.lint()
    rows = [torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * rank for shape in SHAPES]
    found = GraphModule(nn.Module(), graph)(*rows)
    expected = [torch.cat([row - 100 * rank + 100 * other for other in range(ranks)]) for row in rows]
    return [torch.equal(*each) for each in zip(found, expected, strict=True)], graph_passes.list_events(graph)


@pytest.mark.parametrize(("bucket_bytes", "gathers"), [(0, 4), (100, 3), (10**6, 1)])
def test_joined_gathers_that_start_early_give_the_same_tensors(ranks, bucket_bytes, gathers):
    for equal, events in ranks(3)(changed_graphs, bucket_bytes):
        assert equal == [True] * 4
        assert events == ["gather", *["gather", "wait"] * (gathers - 1), "wait"]


@pytest.mark.long
@pytest.mark.alone  # a time
def test_emulated_gathers_hide_once_they_start_early_and_inductor_hides_some():
    # A gather of a weight takes 30 ms, one of a bias 20, and a layer computes for 24.
    layer = 4 * 60 * 61
    slow = gather_hardware(2, layer, alpha_ms=20, bytes_ms=10, forward_ms=24)
    ways = {
        "none": {},
        "early": {"bucketing": "passes"},
        "joined": {"bucketing": "passes", "bucket_mb": layer / MIB},
        "inductor": {"bucketing": "inductor"},
    }
    how = {"nproc": 2, "model": "chain", "dim": 60, "layers": 8, "compile": True, "steps": 2, "emulate": slow}
    runs = labkit.compare("simple_fsdp", ways, rounds=1, **how)
    times = {way: run.value("forward_ms") for way, run in runs.items()}
    for way, predicted_ms in {"none": 8 * 74, "early": 8 * 50 + 24, "joined": 8 * 30 + 24}.items():
        assert times[way] == pytest.approx(predicted_ms, rel=0.15), way
    assert times["joined"] < times["inductor"] < times["none"]
    spent = runs["joined"].frame.query("kind == 'span' and name == 'optimizer' and rank == 0")["dur_us"] / 1000
    assert spent.iloc[0] < spent.iloc[1] + 10, "no timed step makes the optimizer's state, 20 ms"


def test_an_older_torch_refuses_inductors_pass_or_its_buckets(monkeypatch):
    how = {"compile": True, "bucketing": "inductor"}
    for version, more, told in (((2, 11), {}, "needs torch 2.12"), ((2, 12), {"bucket_mb": 1.0}, "needs torch 2.13")):
        monkeypatch.setattr(requirements, "torch_version", lambda version=version: version)
        with pytest.raises(labkit.ParameterError, match=told):
            labkit.run("simple_fsdp", **how | more)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"bucket_mb": 1.0}, "buckets are made by bucketing passes or inductor: choose one"),
        ({"bucketing": "passes"}, "bucketing passes changes compiled graphs: use compile"),
        ({"compile": True, "bucketing": "passes", "sizes_mb": (1.0,), "check": "parity"}, "sizes_mb compares times"),
        ({"compile": True, "bucketing": "passes", "sizes_mb": (1.0,) * 8}, "8 sizes_mb, at most 7: make two runs"),
        ({"model": "moe"}, "model moe has parameters that differ from rank to rank"),
        ({"compile": True, "bucket_mb": 0.0}, "bucket_mb = 0.0 is not float > 0"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(params, told):
    with pytest.raises(labkit.ParameterError, match=told):
        labkit.run("simple_fsdp", **params)
