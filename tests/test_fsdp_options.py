"""launch/fsdp_matrix beyond wrapping: hybrid sharding, FSDP1's own options, the scaler, units by policy, refusals."""

import contextlib
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from fixture_long import long_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit import parity, rank
from labkit.config import build_config, read_config
from labkit.launcher.run import find_program
from labkit.models import catalog
from labkit.models.mlp import MLPStack, UnusedLinear
from labkit.models.protocol import CUDAInitMode, FSDPInitMode
from labkit.parallel import fsdp, units
from labkit.parallel.buckets import apply_gradient_buckets
from labkit.parity import extensions
from labkit.theory import fsdp as theory
from launch import fsdp_matrix, fsdp_wrap

HYBRID = {"hybrid": 2, "steps": 1, "model": "mlp_stack", "dim": 64}
PARITY = {"hybrid": 2, "check": "parity", "steps": 2}
ON_FOUR = {
    "traffic": HYBRID,
    "kept": HYBRID | {"reshard_after_forward": False},
    **{model: PARITY | {"model": model} for model in catalog.MODELS},
}


@pytest.fixture(scope="module", params=long_but([2], [1, 2]))
def hybrid(request):
    """Results of ON_FOUR, two groups of two ranks, in one launch for each version of FSDP."""
    cells = [cell | {"fsdp": request.param} for cell in ON_FOUR.values()]
    return dict(zip(ON_FOUR, run_cells("fsdp_matrix", 4, cells), strict=True))


@pytest.mark.parametrize("model", list(catalog.MODELS))
def test_groups_that_replicate_each_other_compute_what_one_device_computes(hybrid, model):
    result = hybrid[model]
    assert result.value("ok") and result.value("max_rel_error") <= 1e-5
    assert result.value("compared") == result.value("expected") > 0


@pytest.mark.parametrize("name", ["traffic", "kept"])
def test_gathers_stay_in_a_group_and_sums_of_shards_cross_groups(hybrid, name):
    layers, kept = theory.mlp_stack_layers("block", 64), name == "kept"
    expected = theory.hybrid_collectives(layers, group=2, reshard_after_forward=not kept)
    result = hybrid[name]
    assert {name: result.value(name) for name in expected} == expected


def test_a_group_of_all_ranks_sends_what_plain_sharding_sends():
    layers = theory.toy_layers("block", 256, 64)
    alone = theory.hybrid_collectives(layers, group=4)
    plain = theory.step_collectives(layers, 4)
    assert {name.removeprefix("data/"): value for name, value in alone.items() if name.startswith("data/")} == plain
    assert alone["replicate/all_reduce_bytes"] == sum(shard for shard, _ in theory.unit_bytes(layers, 4).values())


SLOW = {"model": "mlp_stack", "dim": 256, "batch": 2, "delay_ms": 10.0, "timeline": True, "steps": 1, "fsdp": 1}
OPTIONS = {
    "pre": {},
    "post": {"backward_prefetch": "post"},
    "none": {"backward_prefetch": "none"},
    "forward": {"forward_prefetch": True},
}
DELAYED = {
    "moe": {"model": "moe", "delay_before_free_ms": 30},
    "delay": {"model": "delay", "delay_after_loss_ms": 30, "delay_before_reduction_ms": 30},
}


@pytest.fixture(scope="module")
def bars():
    """What rank 0 did, in order, by option."""
    cells = {name: SLOW | option for name, option in OPTIONS.items()}
    cells |= {name: option | {"timeline": True, "steps": 1} for name, option in DELAYED.items()}
    results = run_cells("fsdp_matrix", 2, list(cells.values()))
    frames = [each.frame.query("kind == 'bar' and rank == 0 and lane != 'exposed'") for each in results]
    return {name: frame.sort_values("start_us") for name, frame in zip(cells, frames, strict=True)}


@pytest.fixture(scope="module")
def timelines(bars):
    """(lane, unit, phase) of the same."""
    return {name: list(zip(each.lane, each["name"], each.phase, strict=True)) for name, each in bars.items()}


def test_the_delays_of_a_model_are_where_its_options_say(bars):
    def longer_than_30_ms(name):
        return {(bar["name"], bar.phase) for _, bar in bars[name].iterrows() if bar.dur_us > 30_000}

    assert longer_than_30_ms("moe") >= {("net.1", "forward"), ("net.2", "forward")}
    blocks = ("module.net.1", "module.net.1.0", "module.net.2")
    assert longer_than_30_ms("delay") >= {(block, "backward") for block in blocks}
    delay = bars["delay"]
    last = delay[(delay["name"] == "module.net.2") & (delay.phase == "forward")].iloc[-1]
    backward = delay[delay.phase == "backward"].iloc[0]
    assert backward.start_us - last.start_us > 30_000, "after the loss"


def gathers_before(events, *wanted):
    """All-gathers of the backward pass, which come after the three of the forward pass, before the first such event."""
    return sum(event[2] == "all_gather" for event in events[: events.index(wanted)]) - 3


def test_fsdp1_gathers_ahead_in_the_backward_pass_as_it_is_told(timelines):
    computes, reduces = ("compute", "layers.2", "backward"), ("communication", "layers.2", "reduce_scatter")
    seen = {
        name: [gathers_before(timelines[name], *event) for event in (computes, reduces)]
        for name in ("pre", "post", "none")
    }
    assert seen["pre"] == [2, 2], "its own and the next unit's, before it computes"
    assert seen["post"] == [1, 2], "the next unit's once it has computed"
    assert seen["none"] == [1, 1], "the next unit's when that needs it"


def test_fsdp1_gathers_ahead_in_the_forward_pass_if_it_is_told(timelines):
    def before_the_second_block(events):
        second = events.index(("compute", "layers.1", "forward"))
        return sum(event[2] == "all_gather" for event in events[:second])

    assert before_the_second_block(timelines["pre"]) == 1
    assert before_the_second_block(timelines["forward"]) == 2


def overflow(version, enabled):
    """Two steps, of which rank 1 spoils the second: scale, parameters trained here, and how many changed, by step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "alone"))
    lab = catalog.create_model("nonuniform", seed=0)
    model, _ = fsdp.apply_fsdp(lab, mesh, fsdp=version)
    config = fsdp_matrix.Config(scaler=enabled, scaler_init=1024.0, scaler_growth=1)
    scaler = fsdp_matrix.make_grad_scaler(config, torch.device("cpu"))
    optimizer, told = parity.make_sgd(model), []
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters() if p.requires_grad]
    for step in range(2):
        before = [p.detach().clone() for p in local]
        optimizer.zero_grad()
        inputs = parity.draw_samples(lab, torch.device("cpu"), step, dist.get_rank())
        loss = lab.get_loss(inputs, model(*inputs))
        scaler.scale(loss * (float("inf") if step == dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = sum(not torch.equal(old, new) for old, new in zip(before, local, strict=True))
        told.append((scaler.get_scale(), sum(p.numel() for p in local), changed))
    return told


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks):
    first, second = ranks(2)(overflow, 1, True)
    assert (first[0][1], second[0][1]) == (0, 40), "rank 0 holds nothing that is trained"
    assert [step[0] for step in first] == [step[0] for step in second] == [2048.0, 1024.0]
    assert [step[2] for step in second] == [2, 0], "trained, then skipped"
    for steps in ranks(2)(overflow, 2, True):
        assert steps == [(2048.0, 20, 2), (1024.0, 20, 0)]


class Recorder(torch.optim.SGD):
    """Says what it was asked, and what the gradient was just before the step's first batch added to it."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.asked = []

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        gradient = self.param_groups[0]["params"][0].grad
        self.asked.append(None if gradient is None else gradient.abs().max().item())


def train_alone(here, steps, config, scaler=None):
    """What the optimizer saw, the recorded losses, and what each step left; no wrapper, and a rate of 0."""
    lab = catalog.create_model(config.model, seed=0)
    scaler = scaler or fsdp_matrix.make_grad_scaler(config, here.device)
    loop, recorder = fsdp_matrix.TrainingLoop(config, here, lab, lab, scaler), Recorder(lab)
    losses = []

    def measure(count, track, after):
        for step in here.plain_steps(steps, track=track):
            step.record_scalar = lambda name, value, before: losses.append(value.item())
            yield step

    return recorder, losses, loop.run(recorder, measure), lab


def test_gradients_are_zeroed_and_dropped_in_turn_where_they_accumulate(lone_rank):
    recorder, *_ = train_alone(lone_rank, 4, fsdp_matrix.Config(model="mlp_stack", accumulate=2))
    assert recorder.asked == [None, None, 0.0, None], "nothing to zero yet, dropped, zeroed, dropped"
    recorder, *_ = train_alone(lone_rank, 3, fsdp_matrix.Config(model="mlp_stack"))
    assert recorder.asked == [None] * 3


def test_a_steps_loss_and_gradient_are_the_means_of_its_batches(lone_rank):
    _, losses, outcomes, lab = train_alone(lone_rank, 2, fsdp_matrix.Config(model="mlp_stack", accumulate=3))
    gradients = [p.grad.clone() for p in lab.parameters()]
    lab.zero_grad()
    each = []
    for batch in range(3):
        inputs = parity.draw_samples(lab, lone_rank.device, 1, 0, batch, 3)
        each.append(lab.get_loss(inputs, lab(*inputs)))
    sum(each).backward()
    assert losses[1] == pytest.approx(sum(each).item() / 3, rel=1e-6) and len(losses) == 2
    assert outcomes[1].loss.item() == pytest.approx(each[2].item(), rel=1e-6), "the last batch's"
    assert len({round(loss.item(), 6) for loss in each}) == 3, "no batch is another's"
    for gradient, parameter in zip(gradients, lab.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad / 3)


def test_the_scale_grows_with_good_steps_from_where_it_was_told_to_begin(lone_rank):
    config = fsdp_matrix.Config(model="mlp_stack", scaler=True, scaler_init=8.0, scaler_growth=2)
    scaler = fsdp_matrix.make_grad_scaler(config, lone_rank.device)
    train_alone(lone_rank, 5, config, scaler)
    assert scaler.get_scale() == 8.0 * 2**2


@pytest.mark.parametrize("fsdp", [1, 2])
def test_every_step_of_fsdp_wrap_is_compared_with_one_device(fsdp, monkeypatch, lone_rank, capsys):
    monkeypatch.setattr(rank, "session", lambda: contextlib.nullcontext(lone_rank))
    fsdp_wrap.main(fsdp_wrap.Config(check="parity", model="mlp_stack", steps=3, fsdp=fsdp))
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdict["ok"] and verdict["compared"] == 3 * 2 + 12 + 12


def test_without_the_scaler_the_same_step_spoils_the_parameters(ranks):
    first, second = ranks(2)(overflow, 1, False)
    assert [step[0] for step in first] == [1.0, 1.0] and [step[2] for step in second] == [2, 2]


def test_policies_choose_units_from_the_inside_out():
    model = catalog.create_model("nested", seed=0)
    names = {module: name for name, module in model.named_modules()}
    every = {names[module] for module in units.modules_with_parameters(model)}
    assert every == {"net", "net.0", "net.1", "net.1.0", "net.1.0.0", "net.1.1", "net.2", "net.2.0", "net.3"}
    # 36, (80, 272), 68 and 40 numbers
    assert {names[module] for module in units.large_modules(model, 80)} == {"net.1.0.0", "net.1.1", "net"}
    assert units.large_modules(model, 1000) == ()
    tied = catalog.create_model("hf_bert", seed=0)
    assert "model.bert" not in {
        name for name, module in tied.named_modules() if module in units.modules_with_parameters(tied)
    }


def test_a_module_can_be_marked_where_it_is_written():
    model = nn.Sequential(units.wrap(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Sequential(units.wrap(nn.Linear(2, 2))))
    assert list(units.fsdp_units(model, units.is_marked)) == ["0", "2.0"]


def test_blocks_that_are_all_ignored_leave_nothing_to_wrap():
    model = catalog.create_model("nested", seed=0)
    ignored = [module for module in model.modules() if type(module).__name__ == "NestedBlock"]
    with pytest.raises(ValueError, match=r"all blocks of NestedWrappedModule \(NestedBlock\) are ignored or local"):
        units.fsdp_units(model, ("NestedBlock",), ignored)


def average_without_the_second_layer():
    model = UnusedLinear(4)
    apply_gradient_buckets(model, init_device_mesh("cpu", (2,)))
    inputs = model.get_input(torch.device("cpu"))
    try:
        model.get_loss(inputs, model(*inputs)).backward()
    except ValueError as error:
        return str(error)


def test_averaging_says_which_parameters_the_model_does_not_use(ranks):
    for said in ranks(2)(average_without_the_second_layer):
        assert said.startswith(
            "the backward pass gave no gradient to parameters of shape (4,), (4, 4), so their bucket"
        )


MOMENTS = {
    CUDAInitMode.BEFORE: ["to meta", "wrap"],
    CUDAInitMode.AFTER: ["wrap", "to meta"],
    CUDAInitMode.NEVER: ["wrap"],
}


@pytest.mark.parametrize("mode", list(CUDAInitMode))
@pytest.mark.parametrize(("fsdp_init", "wrap"), [(FSDPInitMode.RECURSIVE, "block"), (FSDPInitMode.NO_FSDP, "none")])
def test_a_model_moves_and_is_wrapped_when_its_modes_say(monkeypatch, mode, fsdp_init, wrap):
    called, model = [], MLPStack()
    monkeypatch.setattr(model, "to", lambda device: called.append(f"to {device}"))
    monkeypatch.setattr(
        fsdp, "apply_fsdp", lambda *args, **how: called.append("wrap") or (model, {"wrap": how["wrap"]})
    )
    _, how = fsdp.init_model(model, None, torch.device("meta"), fsdp_init=fsdp_init, cuda_init=mode)
    assert (called, how["wrap"]) == (MOMENTS[mode], wrap)


REFUSED = [
    ({"hybrid": 3}, "2 ranks cannot be cut into groups of hybrid = 3: it must divide them"),
    ({"hybrid": 2, "wrap": "none"}, "wrap none has no unit that could"),
    ({"backward_prefetch": "none"}, "backward_prefetch is an option of FSDP1: use fsdp 1, or leave it out"),
    ({"fsdp": 1, "use_orig_params": False, "freeze": (1,)}, "a flat parameter is trained or not as a whole"),
    ({"input_grad": True, "model": "hf_bert"}, "an input's gradient needs numbers, not tokens"),
    ({"compile_only": ("Linear",)}, "says what compile compiles: set compile"),
    ({"ignore": ("Nothing",)}, "model toy has no block of type Nothing"),
    ({"model": "moe", "delay_after_loss_ms": 3}, "model moe has no size delay_after_loss_ms"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_before_a_launch(params, message):
    with pytest.raises(labkit.ParameterError, match=message):
        labkit.run("fsdp_matrix", nproc=2, **params)


PAPER = {
    "convnext_spatial": {
        **{"batch": 7, "height": 512, "width": 1024, "num_classes": 1000, "steps": 20, "learning_rate": 1e-4},
        **{"depths": (3, 3, 27, 3), "dims": (256, 512, 1024, 2048), "strategy": "local", "tensor_dim": 3},
        "input_grad": True,
    },
    "fsdp_wrap": {"steps": 20, "model": "toy", "wrap": "block"},
    "fsdp_matrix": {"steps": 20, "model": "toy", "wrap": "block"},
    "ddp_compile": {"dim": 2000, "bucket_mb": 25.0, "fuse": "coalesced", "inductor": True},
    "two_dim": {"dim": 2000, "tp": 2},
    "decoder": {"model": "llama_2_7b", "batch": 1, "precision": "bf16", "checkpointing": "full", "tp": 1, "steps": 20},
    "allgather_extensions": {"steps": 10, "reshard_after_forward": True},
}
BERT_BASE = {"vocab": 30522, "hidden": 768, "layers": 12, "heads": 12, "mlp_ratio": 4, "tokens": 512}
T5_SMALL = {"vocab": 32128, "hidden": 512, "layers": 6, "heads": 8, "mlp_ratio": 4, "tokens": 512}
SIZES = {"toy": {"hidden": 10000, "narrow": 1000}, "hf_bert": BERT_BASE, "hf_t5": T5_SMALL}


@pytest.mark.parametrize("program", list(PAPER))
def test_the_papers_preset_or_a_default_has_its_values(program):
    kind = read_config(find_program(program)[0])
    preset = {"preset": "paper"} if hasattr(kind, "PRESETS") else {}
    chosen = vars(build_config(kind, preset, 4))
    assert {name: chosen[name] for name in PAPER[program]} == PAPER[program]


def test_the_extensions_are_compared_on_the_papers_network():
    mlps = extensions.three_mlps("cpu")
    assert [(mlp.in_proj.weight.shape, mlp.in_proj.bias) for mlp in mlps] == [((32, 8), None)] * 3
    optimizer = extensions.make_foreach_adam(mlps.parameters())
    assert (extensions.BATCH, optimizer.defaults["lr"], optimizer.defaults["foreach"]) == (2, 1e-2, True)


@pytest.mark.parametrize("model", list(catalog.MODELS))
def test_every_model_of_the_fsdp_lab_has_the_papers_sizes(model):
    config = read_config(find_program("fsdp_wrap")[0])
    assert config(preset="paper", model=model).model_sizes() == SIZES.get(model, {})
    catalog.check_model(model, sizes=SIZES.get(model, {}))


def test_every_size_of_a_model_is_an_option_that_reaches_it():
    sizes = {name for entry in catalog.MODELS.values() for name in entry.sizes}
    assert set(fsdp_matrix.Config.SIZES) == sizes
    chosen = fsdp_matrix.Config(**dict.fromkeys(sizes, 7)).model_sizes()
    assert chosen == dict.fromkeys(sizes, 7)
    delays = {"delay_after_loss_ms": 3, "delay_before_reduction_ms": 2}
    lab = fsdp_matrix.build_model(fsdp_matrix.Config(model="delay", **delays), torch.device("cpu"), 0)
    assert lab.delay_after_loss_ms == 3


@pytest.mark.long  # two processes that import torch; test_spatial.py and test_two_dim.py start such, too
def test_under_a_bare_torchrun_every_rank_prints_its_numbers():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "launch.fsdp_wrap", "--model", "mlp_stack", "--steps", "1"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    first, second = said.split("rank 1\n")
    assert first.startswith("rank 0\n")
    for table in (first, second):
        rows = {line.split()[0] for line in table.splitlines() if line}
        assert {"step", "forward", "backward", "optimizer", "resident", "all_gather", "peak_total"} <= rows
