"""labkit.parallel.fsdp, launch/fsdp_wrap and fsdp_matrix: equal to one device in every cell, and exactly
what theory says.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from fixture_long import long_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit import parity
from labkit.models import catalog
from labkit.models.mlp import MLPStack
from labkit.models.protocol import CUDAInitMode, FSDPInitMode
from labkit.models.skip import SkipModel
from labkit.parallel.checkpointing import apply_activation_checkpointing
from labkit.parallel.fsdp import apply_fsdp1, init_model
from labkit.parallel.units import fsdp_units, inner_first, layer_types, modules_sharing_weights
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training
from labkit.theory import fsdp as theory
from tests.programs import fsdp_grid

pytestmark = pytest.mark.alone  # beside other launches, thousands of small collectives take four times as long

GRID = Path(__file__).parent / "programs" / "fsdp_grid.py"
GRADIENTS = {
    "toy": 24,
    "hf_bert": 40,
    "hf_t5": 47,
    "transformer": 68,
    "nested": 10,
    "nonuniform": 2,
    "delay": 10,
    "moe": 8,
    "mlp_stack": 12,
    "double_linear": 4,
    "unused_linear": 2,
    "skip": 3,
}
LIMITS = {"fp32": 1e-5, "bf16": 2e-2, "autocast": 2e-2, "fp16": 2e-3, "pure_fp16": 2e-3}


PARITY = fsdp_grid.pairwise_sample()
# Of each model with one version or the other; without a wrapper, too.
SEEN = [*fsdp_grid.CONTROLS[:12:2], *fsdp_grid.CONTROLS[13::2], fsdp_grid.CONTROLS[-1]]


@pytest.fixture(scope="module")
def verdicts(request):
    """What the parity check says of each cell that this session asks for, by test and cell: one launch."""
    items = [item for item in request.session.items if "verdicts" in getattr(item, "fixturenames", ())]
    asked = [next(iter(item.callspec.params.items())) for item in items if not item.get_closest_marker("skip")]
    cells = [json.dumps((kind == "control", cell)) for kind, cell in asked]
    result = labkit.run(GRID, nproc=2, device="cpu", timeout_s=500, cells=cells)
    lines = [json.loads(line) for line in result.ranks[0].log().splitlines() if line.startswith('{"')]
    return dict(zip(((kind, fsdp_grid.name_of(cell)) for kind, cell in asked), lines, strict=True))


@pytest.mark.timeout(520)
@pytest.mark.parametrize("cell", long_but(PARITY, fsdp_grid.CELLS), ids=fsdp_grid.name_of)
def test_a_cell_of_the_grid_equals_one_device(verdicts, cell):
    verdict = verdicts["cell", fsdp_grid.name_of(cell)]
    assert verdict["ok"], verdict
    assert verdict["max_rel_error"] <= verdict["limit"] == LIMITS[cell.get("precision", "fp32")], verdict
    assert verdict["compared"] == verdict["expected"], verdict
    named = cell.get("use_orig_params", True)
    gradients = GRADIENTS[cell["model"]] if named else 0
    outputs = 2 if cell["model"] == "double_linear" else 1
    inputs = 1 if cell.get("input_grad") else 0
    least = fsdp_grid.steps_of(cell) * (1 + outputs + inputs) + gradients + GRADIENTS[cell["model"]]
    assert verdict["compared"] >= least, "losses, outputs, gradients, parameters"
    assert named or verdict["compared"] < least + GRADIENTS[cell["model"]], "a flat parameter has no names"
    if cell.get("scaler"):
        assert verdict["scale"] == 65536.0


@pytest.mark.timeout(520)
@pytest.mark.parametrize("control", long_but(SEEN, fsdp_grid.CONTROLS), ids=fsdp_grid.name_of)
def test_gradients_that_are_one_percent_off_are_seen(verdicts, control):
    verdict = verdicts["control", fsdp_grid.name_of(control)]
    assert not verdict["ok"] and 0.005 < verdict["max_rel_error"] < 0.02, verdict


def test_every_setting_of_the_grid_is_in_the_sample_and_every_model_with_both_versions():
    assert len(fsdp_grid.CELLS) == 12 * (4 + 4) + 19 + 3 + 12 * (8 + 4) + 11 * 2 + 19 + 2
    assert len({fsdp_grid.name_of(cell) for cell in fsdp_grid.CELLS}) == len(fsdp_grid.CELLS)
    settings = {(name, str(value)) for cell in fsdp_grid.CELLS for name, value in cell.items()}
    assert settings == {(name, str(value)) for cell in PARITY for name, value in cell.items()}
    versions = {(cell["fsdp"], cell["model"]) for cell in PARITY}
    assert versions == set(itertools.product((1, 2), catalog.MODELS)) and len(PARITY) <= 42


def test_the_comparison_sees_outputs_of_another_structure_and_leaves_that_differ():
    found, x = parity.Parity(), torch.ones(2)
    found.compare_leaves("output", {"a": (x, x), "b": [x]}, {"a": (x, x), "b": [x]})
    assert (found.compared, found.max_rel_error) == (3, 0)
    found.compare_leaves("output", (x, 1.5 * x), (x, x))
    assert found.max_rel_error == 0.5 and found.worst == "output[1]"
    with pytest.raises(ValueError, match="output: structure"):
        found.compare_leaves("output", (x,), [x])
    with pytest.raises(ValueError, match="output holds no tensor"):
        found.compare_leaves("output", (), ())


@pytest.mark.parametrize("model", list(catalog.MODELS))
def test_the_reference_has_gradients_that_are_alive(model):
    one_device = parity.OneDevice(lambda index: catalog.create_model(model, seed=0, expert_seed=index), 2)
    for step in range(3):
        one_device.train_step(step)
    reference = one_device.copies[1]
    unused = {id(p) for module in reference.unused_modules() for p in module.parameters()}
    gradients = [p.grad for p in reference.parameters() if p.requires_grad and id(p) not in unused]
    assert len(gradients) == GRADIENTS[model]
    assert all(gradient is not None and gradient.abs().max() > 1e-9 for gradient in gradients)


def test_experts_differ_and_the_shared_part_does_not():
    one_device = parity.OneDevice(lambda index: catalog.create_model("moe", seed=0, expert_seed=index), 2)
    first, second = one_device.copies
    start = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    one_device.train_step(0)
    local = {id(p) for module in first.local_modules() for p in module.parameters()}
    same = [torch.equal(a.grad, b.grad) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert start == same == [id(p) not in local for p in first.parameters()]
    assert True in same and False in same


SETUPS = [
    ("mlp_stack", "block", {"dim": 128, "batch": 64}),
    ("mlp_stack", "root", {"dim": 128, "batch": 64}),
    ("toy", "block", {"hidden": 256, "narrow": 64, "batch": 512}),
]
HOW = [(2, True, False), (2, True, True), (2, False, False), (4, True, False)]
SLOW = {"model": "mlp_stack", "dim": 512, "batch": 2, "delay_ms": 10.0, "timeline": True, "steps": 1}
FROZEN = {"model": "mlp_stack", "dim": 64, "freeze": (1,)}
CELLS = {
    "skipped": {"skip": (3,), "steps": 1, "hidden": 256, "narrow": 64},
    "frozen": FROZEN | {"steps": 1},
    "frozen, checked": FROZEN | {"check": "parity", "steps": 2},
}


def cell_of(model, wrap, sizes, reshard, checkpointing):
    how = {"reshard_after_forward": reshard, "checkpointing": checkpointing}
    return {"model": model, "wrap": wrap, "steps": 1, **sizes, **how}


@pytest.fixture(scope="module")
def runs():
    """Results of all cells, by what they are called or by how they differ: one launch for each number of ranks."""
    found = {}
    for ranks in (2, 4):
        cells = dict(CELLS) if ranks == 2 else {}
        for (model, wrap, sizes), (count, *how) in itertools.product(SETUPS, HOW):
            if count == ranks:
                cells[model, wrap, ranks, *how] = cell_of(model, wrap, sizes, *how)
        found |= dict(zip(cells, run_cells("fsdp_matrix", ranks, list(cells.values())), strict=True))
    return found


def layers_of(model, wrap, sizes):
    if model == "toy":
        return theory.toy_layers(wrap, sizes["hidden"], sizes["narrow"]), sizes["batch"]
    return theory.mlp_stack_layers(wrap, sizes["dim"]), sizes["batch"] * 8


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("model", "wrap", "sizes"), SETUPS)
@pytest.mark.parametrize(("ranks", "reshard", "checkpointing"), HOW)
def test_traffic_and_memory_are_what_theory_says(runs, model, wrap, sizes, ranks, reshard, checkpointing):
    how = {"reshard_after_forward": reshard, "checkpointing": checkpointing}
    result = runs[model, wrap, ranks, reshard, checkpointing]
    layers, samples = layers_of(model, wrap, sizes)
    exact = theory.step_collectives(layers, ranks, reshard_after_forward=reshard) | theory.resident_bytes(layers, ranks)
    assert {name: result.value(name) for name in exact} == exact
    peak = theory.fsdp_step_peak(layers, samples, ranks, **how)
    assert result.value("peak_total_bytes") == pytest.approx(peak["total"], rel=0.05)
    parts = sum(result.value(f"peak_{name}_bytes") for name in ("parameter", "optstate"))
    assert parts == peak["parameter"] + peak["optstate"]


def test_several_blocks_in_one_unit_are_gathered_and_measured_together():
    """torch's memory tracker hooks each module, and would end the unit with the first of them."""
    how = {"model": "mlp_stack", "dim": 64, "layers": 4, "batch": 8, "steps": 1}
    layers = theory.mlp_stack_layers("block", 64, 4)
    sizes = [full for _, full in theory.unit_bytes(layers, 2).values()]
    pairs = [dataclasses.replace(layer, unit=str(place // 4)) for place, layer in enumerate(layers)]
    limited = {"wrap": "limit", "limit": max(sizes[0] + sizes[1], sizes[2] + sizes[3])}
    result, checked = run_cells("fsdp_wrap", 2, [how | limited, how | limited | {"check": "parity"}])
    exact = theory.step_collectives(pairs, 2) | theory.resident_bytes(pairs, 2)
    assert exact["all_gather_count"] == 4
    assert {name: result.value(name) for name in exact} == exact
    peak = theory.fsdp_step_peak(pairs, 8 * 8, 2)["total"]
    assert result.value("peak_total_bytes") == pytest.approx(peak, rel=0.05)
    assert checked.value("ok") == 1


def test_a_skipped_block_costs_one_gather_less(runs):
    result = runs["skipped"]
    wrong = theory.step_collectives(theory.toy_layers("block", 256, 64, skip=(3,)), 2)
    right = theory.step_collectives(theory.toy_layers("block", 256, 64), 2)
    assert {name: result.value(name) for name in wrong} == wrong
    assert wrong["reduce_scatter_count"] == right["reduce_scatter_count"] - 1


@pytest.mark.parametrize(
    ("blocks", "frozen", "gathers", "reduced"),
    [(3, (1,), 6, 2), (4, (0,), 8, 3), (4, (0, 1), 7, 2), (4, (0, 1, 3), 7, 1), (4, (3,), 8, 3), (4, (0, 1, 2), 6, 1)],
)
def test_of_the_frozen_blocks_in_front_all_but_the_last_are_gathered_once(blocks, frozen, gathers, reduced):
    """The first four are what lab 2b measures on ranks."""
    layers = theory.mlp_stack_layers("block", 8, blocks)
    sent = theory.step_collectives(layers, 2, frozen=[f"block {index}" for index in frozen])
    assert (sent["all_gather_count"], sent["reduce_scatter_count"]) == (gathers, reduced)
    sizes = theory.unit_bytes(layers, 2)
    trained = [full for unit, (_, full) in sizes.items() if unit not in {f"block {index}" for index in frozen}]
    assert sent["reduce_scatter_bytes"] == sum(trained)


def test_gathering_ahead_hides_all_gathers_behind_compute():
    for _ in range(3):  # whatever else runs can delay the one step that is profiled
        waiting, ahead = (run_cells("fsdp_wrap", 2, [SLOW | {"prefetch": way}])[0] for way in (False, True))
        if not hidden_gathers(waiting) and {"layers.1", "layers.2"} <= hidden_gathers(ahead):
            break
    else:
        pytest.fail(f"hidden without prefetch: {hidden_gathers(waiting)}; with it: {hidden_gathers(ahead)}")
    for run in (waiting, ahead):
        assert 0 < run.value("exposed_communication") <= run.value("communication") < run.value("profiled_step")
        assert run.value("all_gather_count") == 6, "the traced step counts what the profiled one shows"
        bars = run.frame.query("lane == 'communication' and phase == 'all_gather' and rank == 0")
        order = bars.sort_values("start_us")["name"].to_list()
        assert order == ["layers.0", "layers.1", "layers.2", "layers.2", "layers.1", "layers.0"]
        assert all(run.folder.joinpath(f"rank_0000{rank}.trace.json.gz").stat().st_size > 1000 for rank in (0, 1))


def hidden_gathers(run):
    """Units with an all-gather of which most is covered by compute, on rank 0."""
    bars = run.frame.query("kind == 'bar' and rank == 0")
    gathers = bars.query("lane == 'communication' and phase == 'all_gather'")
    compute = bars.query("lane == 'compute'")
    found = set()
    for _, bar in gathers.iterrows():
        start, end = bar["start_us"], bar["start_us"] + bar["dur_us"]
        covered = (compute["start_us"] + compute["dur_us"]).clip(upper=end) - compute["start_us"].clip(lower=start)
        if covered.clip(lower=0).sum() > 0.6 * bar["dur_us"]:
            found.add(bar["name"])
    return found


def test_frozen_blocks_have_neither_gradient_nor_optimizer_state(runs):
    result = runs["frozen"]
    expected = theory.resident_bytes(theory.mlp_stack_layers("block", 64), 2, frozen=("block 1",))
    assert {name: result.value(name) for name in expected} == expected
    assert result.value("reduce_scatter_count") == 2
    checked = runs["frozen, checked"]
    assert checked.value("ok") and checked.value("compared") == 4 + 12 + 8, "losses, outputs, parameters, gradients"


def init_modes(fsdp_init, cuda_init, fsdp, name="mlp_stack"):
    """One training step in these modes: how many tensors equal one device's, and how many units there are."""
    device, mesh = torch.device("cpu"), init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "alone"))
    model = catalog.create_model(name, seed=0, expert_seed=dist.get_rank())
    wrapped, units = init_model(model, mesh, device, fsdp_init=fsdp_init, cuda_init=cuda_init, fsdp=fsdp)
    one_device = parity.OneDevice(lambda index: catalog.create_model(name, seed=0, expert_seed=index), 2)
    optimizer, mine = parity.make_sgd(wrapped), dist.get_rank()
    inputs = parity.draw_samples(model, device, 0, mine)
    output = wrapped(*inputs)
    loss = model.get_loss(inputs, output)
    model.run_backward(loss)
    optimizer.step()
    verdict = compare_fsdp_training(one_device, wrapped, [StepOutcome(loss, output, inputs)], rank=mine, steps=1)
    return verdict["ok"], verdict["compared"], len(units)


@pytest.mark.parametrize("cuda_init", list(CUDAInitMode))
@pytest.mark.parametrize(
    ("fsdp_init", "fsdp", "units"),
    [(FSDPInitMode.NO_FSDP, 2, 0), (FSDPInitMode.RECURSIVE, 2, 3), (FSDPInitMode.RECURSIVE, 1, 4)],
)
def test_every_way_to_initialise_trains_as_one_device(ranks, fsdp_init, cuda_init, fsdp, units):
    assert ranks(2)(init_modes, fsdp_init, cuda_init, fsdp) == [(True, 2 + 2 * 12, units)] * 2


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("fsdp_init", list(FSDPInitMode))
def test_experts_learn_from_their_own_rank_alone(ranks, fsdp_init, fsdp):
    for ok, compared, _ in ranks(2)(init_modes, fsdp_init, CUDAInitMode.NEVER, fsdp, "moe"):
        assert (ok, compared) == (True, 2 + 2 * 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_of_a_small_case_by_hand(stage):
    by_hand = {0: (400, 400, 800), 1: (400, 400, 200), 2: (400, 100, 200), 3: (100, 100, 200)}
    assert tuple(theory.zero_bytes(100, 4, stage).values()) == by_hand[stage]


def test_an_uneven_parameter_is_padded_to_whole_rows_of_every_rank():
    assert theory.shard_elements((5, 3), 2) == 9
    layer = theory.LinearLayer(inputs=3, outputs=5, unit="root")
    assert theory.unit_bytes([layer], 2) == {"root": (4 * (9 + 3), 2 * 4 * (9 + 3))}


REFUSED = [
    ({"model": "gpt"}, "model = .gpt. is not one of .toy., .hf_bert."),
    ({"blocks": ("T5Block",)}, "model toy has no block of type T5Block: it has Linear, MyModule"),
    ({"model": "moe", "dim": 8}, "model moe has no size dim"),
    ({"wrap": "none", "precision": "bf16"}, "wrap none has no unit"),
    ({"wrap": "root", "skip": (1,)}, "use wrap block"),
    (
        {"compile": True, "checkpointing": True, "delay_ms": 1.0},
        "a checkpointed block that sleeps does not compile: leave out delay_ms or checkpointing",
    ),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_a_launch(params, message, runs_folder):
    before = set(runs_folder.iterdir())
    with pytest.raises(labkit.ParameterError, match=message):
        labkit.run("fsdp_matrix", nproc=2, **params)
    assert set(runs_folder.iterdir()) == before


def test_a_missing_extra_is_named_before_a_launch():
    code = (
        "import importlib.util, labkit\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "try: labkit.run('fsdp_wrap', nproc=2, model='hf_bert')\n"
        "except labkit.ParameterError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert "model hf_bert needs transformers: pip install 'labkit[hf]'; without it: toy" in said


def test_units_of_tied_modules_are_joined():
    bert = catalog.create_model("hf_bert", seed=0)
    units = fsdp_units(bert, bert.block_types)
    joined = [modules for modules in units.values() if len(modules) > 1]
    assert [type(module).__name__ for module in joined[0]] == ["BertLMPredictionHead", "Embedding"]
    assert len(joined) == 1 and len(units) == 3


@pytest.mark.parametrize("model", list(catalog.MODELS))
def test_every_parameter_is_in_one_unit_or_the_root(model):
    lab = catalog.create_model(model, seed=0)
    units = fsdp_units(lab, layer_types(lab), lab.local_modules())
    holders = [(name, id(p)) for name, group in units.items() for m in group for p in m.parameters(recurse=False)]
    for parameter in {number for _, number in holders}:
        assert len({name for name, number in holders if number == parameter}) == 1, "a tied parameter in two units"
    position = {id(m): index for index, group in enumerate(inner_first(units)) for m in group}
    for outer, inner in itertools.permutations([m for group in units.values() for m in group], 2):
        if inner in set(outer.modules()) and position[id(inner)] != position[id(outer)]:
            assert position[id(inner)] < position[id(outer)], "inner units are wrapped first"


def test_nested_skip_and_unknown_blocks():
    model = SkipModel(double_nest=True)
    assert list(fsdp_units(model, model.block_types)) == ["nested_linear", "nested_linear.nested_linear"]
    assert list(fsdp_units(model, layer_types(model))) == [
        *("linear", "linear_skip.lin", "nested_linear.nested_linear.nested_linear")
    ]
    assert list(fsdp_units(MLPStack(), ("MLP",), skip=(1,))) == ["layers.0", "layers.2"]
    with pytest.raises(ValueError, match=r"no block of type Missing in SkipModel: it has .*Linear"):
        fsdp_units(model, ("Missing",))
    with pytest.raises(ValueError, match=r"skip \[9\] counts blocks that are not there: the model has 3"):
        fsdp_units(MLPStack(), ("MLP",), skip=(9,))


def test_checkpointing_keeps_names_plain_and_refuses_absent_blocks():
    model = MLPStack()
    assert apply_activation_checkpointing(model, ("MLP",)) == 3
    assert list(fsdp_units(model, ("MLP",))) == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(ValueError, match="no block of type Linear in ReLU"):
        apply_activation_checkpointing(nn.ReLU(), ("Linear",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin memory for")
def test_fsdp1_does_not_offload_without_a_gpu():
    with pytest.raises(ValueError, match=r"FSDP1 pins the memory .* use fsdp 2"):
        apply_fsdp1(MLPStack(), block_types=("MLP",), cpu_offload=True)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_compiled_compute_gives_the_losses_of_eager_compute():
    how = {"model": "mlp_stack", "steps": 3}
    cells = [how | {"compile": False}, how | {"compile": True}]
    runs = run_cells("fsdp_matrix", 2, [*cells, cells[1] | {"compile_only": ("Linear",)}], timeout_s=150)
    graphs = [run.value("compiled_graphs") for run in runs[1:]]  # of one process, so they add up
    assert graphs[0] == 3, "one for each block, or nothing was compiled"
    assert graphs[1] > 3 + 3, "more, if layers are chosen: blocks again would be as many or none"
    losses = [run.frame.query("kind == 'scalar' and name == 'loss'")["value"].to_list() for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 2 * (1 + 3 + 1)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_compiled_compute_is_compared_with_one_device(fsdp):
    how = {"model": "mlp_stack", "compile": True, "check": "parity", "steps": 3, "fsdp": fsdp}
    (verdict,) = run_cells("fsdp_matrix", 2, [how], timeout_s=180)
    assert verdict.value("ok") and verdict.value("compared") == 3 * 2 + 12 + 12
    assert verdict.value("compiled_graphs") == 3


def test_modules_that_share_a_weight_hold_the_same_object_themselves():
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "inner": nn.Sequential(nn.Linear(4, 4)), "equal": nn.Linear(4, 4)})
    first, inner, equal = model.values()
    equal.load_state_dict(first.state_dict())
    assert not modules_sharing_weights(model, first), "equal numbers are not a tie"
    inner[0].bias = first.bias
    assert modules_sharing_weights(model, first) == [inner[0]], "not the container around it"
    assert modules_sharing_weights(model, inner) == [first]
