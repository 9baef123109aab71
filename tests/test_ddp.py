"""labkit.parallel.ddp and rank.traffic: one device's gradients, in the buckets that theory says, on real ranks."""

import contextlib
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fixture_long import long_but
from torch._dynamo import trace_rules
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh

from labkit import inductor
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parity import ddp as parity
from labkit.session.traffic import BucketRecorder, CommunicationCounter, match_gradients
from labkit.theory.ddp import chain_buckets, chain_gradients

CPU = torch.device("cpu")
DIM, BUCKET_MB = 512, 1.6  # weights of 1 MiB: as many buckets as at width 2000 and 25 MiB
ON_THE_WIRE = {"bf16": 2, "fp16": 2}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def chain(case, dim=DIM):
    """What builds the model of a case."""
    return partial(parity.build_chain, dim, ddp.DDP_CASES[case], CPU, batch=1)


def compare(case, inductor):
    how = {"bucket_mb": BUCKET_MB, "inductor": inductor}
    return parity.compare_techniques(chain(case), mesh(), ddp.DDP_CASES[case], **how)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "inductor"),
    long_but(
        [("cpu", False)],
        [(name, True) for name in ddp.DDP_CASES if name != "gpu"] + [("cpu", False), ("fp16", False)],
    ),
)
def test_every_technique_gives_the_gradients_of_one_device(ranks, case, inductor):
    for verdict in ranks(2, timeout_s=180)(compare, case, inductor):
        assert verdict["ok"], verdict
        assert verdict["compared"] == verdict["expected"] == 4 * (2 * 9 + 8), (
            "8 gradients in 2 steps and 8 parameters, by 4 techniques"
        )
        assert verdict["limit"] == {"bf16": 2e-2, "fp16": 2e-3}.get(case, 1e-5)
        assert verdict["gradients_alive"] and verdict["sent_without_sync"] == 0
        once = 4 * 4 * (DIM * DIM + DIM) // ON_THE_WIRE.get(case, 1)
        assert verdict["sent_bytes"] == dict.fromkeys(parity.COMPARISON_MODES, 2 * once)
        compiled = [count > 0 for count in verdict["compiled_backwards"].values()]
        assert compiled == [False, False, True, True]


def compare_eager(case):
    return parity.compare_techniques(chain(case, 8), mesh(), ddp.DDP_CASES[case], modes=("ddp", "replicate"))


@pytest.mark.parametrize("case", [name for name in ddp.DDP_CASES if name != "gpu"])
def test_without_a_compiler_every_case_gives_the_gradients_of_one_device(ranks, case):
    for verdict in ranks(2)(compare_eager, case):
        assert verdict["ok"], verdict
        assert verdict["compared"] == verdict["expected"] == 2 * (2 * 9 + 8)
        assert verdict["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}.get(case, "float32")
        assert verdict["sent_bytes"] == dict.fromkeys(("ddp", "replicate"), 2 * 4 * 4 * 72 // ON_THE_WIRE.get(case, 1))


@pytest.mark.parametrize(("case", "calls"), [("checkpoint", 2), ("cpu", 1)])
def test_the_case_of_checkpoint_computes_the_first_layer_twice(case, calls):
    model, called = chain(case, 8)(), []
    model.fc1.register_forward_pre_hook(lambda *_: called.append(1))
    inputs = model.get_input(CPU)
    model.get_loss(inputs, model(*inputs)).backward()
    assert len(called) == calls


def averaged_gradients(mode, case):
    """What a rank has after a backward pass, and what it should have: a mean in the case's type."""
    lab, expected = chain(case, 16)(), chain(case, 16)()
    inputs = lab.get_input(CPU, seed=dist.get_rank())
    with ddp.apply_technique(lab, mesh(), mode, ddp.DDP_CASES[case]) as (model, _):
        lab.get_loss(inputs, model(*inputs)).backward()
    expected.get_loss(inputs, expected(*inputs)).backward()
    for parameter in expected.parameters():
        sent = parameter.grad.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(case, "float32")))
        dist.all_reduce(sent.div_(dist.get_world_size()))
        parameter.grad = sent.float()
    return [[parameter.grad.tolist() for parameter in model.parameters()] for model in (lab, expected)]


@pytest.mark.parametrize("mode", ["ddp", "replicate"])
@pytest.mark.parametrize("case", ["cpu", "bf16", "fp16"])
def test_gradients_are_rounded_to_the_type_that_they_travel_in(ranks, mode, case):
    for actual, expected in ranks(2)(averaged_gradients, mode, case):
        assert actual == expected


def unaveraged():
    """Forget to average."""
    original = ddp.gradient_sync
    ddp.gradient_sync = lambda model, enabled: original(model, False)
    try:
        return parity.compare_techniques(chain("cpu", 8), mesh(), ddp.DDP_CASES["cpu"], steps=1, inductor=False)
    finally:
        ddp.gradient_sync = original


@contextlib.contextmanager
def eager_backward(*, inductor):
    yield


def compiled_otherwise(forgotten, inductor):
    """Compile one pass in another way than was asked for."""
    original = getattr(ddp, forgotten)
    others = {
        "compile_backward": eager_backward,
        "apply_compile": lambda model, *, inductor: None,
        "capture_generated_code": lambda: contextlib.nullcontext(["_c10d_functional"]),
    }
    setattr(ddp, forgotten, others[forgotten])
    try:
        return parity.compare_techniques(chain("cpu", 8), mesh(), ddp.DDP_CASES["cpu"], steps=1, inductor=inductor)
    finally:
        setattr(ddp, forgotten, original)


@pytest.mark.parametrize("inductor", [True, False])
def test_the_comparison_sees_that_nothing_was_compiled(ranks, inductor):
    for verdict in ranks(2)(compiled_otherwise, "compile_backward", inductor):
        assert not verdict["ok"] and verdict["max_rel_error"] <= 1e-5
        assert verdict["compiled_backwards"]["compiled"] == 0


def test_the_comparison_sees_a_program_of_inductors_where_there_should_be_none(ranks):
    for verdict in ranks(2)(compiled_otherwise, "capture_generated_code", False):
        assert not verdict["ok"] and verdict["max_rel_error"] <= 1e-5


@pytest.mark.long
def test_the_comparison_sees_that_the_forward_pass_was_not_compiled(ranks):
    for verdict in ranks(2)(compiled_otherwise, "apply_compile", True):
        assert not verdict["ok"] and verdict["max_rel_error"] <= 1e-5
        assert verdict["compiled_backwards"]["compiled"] > 0


def early_waits():
    """Forget to move the waits."""
    original = ddp.fuse_all_reduces
    ddp.fuse_all_reduces = lambda mode, bucket_mb, late_waits: original(mode, bucket_mb, late_waits=False)
    try:
        return parity.compare_buckets(chain("cpu"), mesh(), ddp.DDP_CASES["cpu"], bucket_mb=BUCKET_MB, fuse="coalesced")
    finally:
        ddp.fuse_all_reduces = original


def test_the_check_of_buckets_sees_waits_that_come_too_early(ranks):
    for verdict in ranks(2, timeout_s=100)(early_waits):
        assert verdict["counted"] == [3, 3] and verdict["waits_missing"] == 0
        assert verdict["most_in_flight"] == [1, 1] and not verdict["ok"]


def test_the_comparison_sees_gradients_that_were_not_averaged(ranks):
    for verdict in ranks(2)(unaveraged):
        assert not verdict["ok"] and verdict["max_rel_error"] > 0.01
        assert verdict["compared"] == 4 * (16 + 1)


def eager_buckets(mode, case, bucket_mb):
    """What a rank sends in two backward passes."""
    lab = parity.build_chain(DIM, ddp.DDP_CASES[case], CPU, batch=1)
    with ddp.apply_technique(lab, mesh(), mode, ddp.DDP_CASES[case], bucket_mb=bucket_mb) as (model, _):
        return [watch(lab, model, step) for step in range(2)]


def watch(lab, model, step):
    """The buckets of one step, as (name, bytes) in order."""
    lab.zero_grad()
    with BucketRecorder() as wire:
        inputs = lab.get_input(CPU, seed=2 * step + dist.get_rank())
        lab.get_loss(inputs, model(*inputs)).backward()
    return [list(bucket.items()) for bucket in wire.gradients_by_bucket(lab.named_parameters())]


@pytest.mark.parametrize("mode", ["ddp", "replicate"])
@pytest.mark.parametrize(("case", "bucket_mb"), [("cpu", 25.0), ("cpu", 1.6), ("cpu", 0.5), ("bf16", 1.6)])
def test_the_eager_reducer_sends_one_bucket_and_from_then_on_those_of_theory(ranks, mode, case, bucket_mb):
    theory = chain_buckets(DIM, bucket_mb, compressed=case == "bf16")
    for first, second in ranks(2)(eager_buckets, mode, case, bucket_mb):
        assert len(first) == 1 and len(first[0]) == 8
        assert second == [list(bucket.items()) for bucket in theory]
    assert len(theory) == {25.0: 2, 1.6: 2, 0.5: 4}[bucket_mb]


def test_gradients_become_ready_as_theory_says():
    model, order = LinearChain(8), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.ones(1, 8)).sum().backward()
    assert order == [name for name, _ in chain_gradients(8)]


def compiled_wire(fuse, late_waits, case):
    """What a compiled step sends, how often it was counted, and its program."""
    case = ddp.DDP_CASES[case]
    lab, how = (
        parity.build_chain(DIM, case, CPU, batch=1),
        {"fuse": fuse, "bucket_mb": BUCKET_MB, "late_waits": late_waits},
    )
    with ddp.apply_technique(lab, mesh(), "compiled", case, **how) as (model, programs):
        seen, counted = watch(lab, model, 0), ddp.pop_bucket_count()
        assert ddp.pop_bucket_count() == 0, "asked twice"
    return seen, counted, programs[-1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("late_waits", [True, False])
def test_unfused_gradients_travel_alone_and_waits_move(ranks, late_waits):
    for seen, counted, program in ranks(2)(compiled_wire, "none", late_waits, "cpu"):
        assert seen == [list(bucket.items()) for bucket in chain_buckets(DIM, way="compiled", fuse=False)]
        assert counted == 0
        kinds = [line.kind for line in inductor.parse_lines(program) if line.kind in ("collective", "wait")]
        runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
        assert runs == ([("collective", 8), ("wait", 8)] if late_waits else [("collective", 1), ("wait", 1)] * 8)


@pytest.mark.timeout(120)
def test_inductor_fuses_no_gradient_that_travels_in_sixteen_bits(ranks):
    for seen, counted, _ in ranks(2)(compiled_wire, "coalesced", True, "bf16"):
        assert counted == 0
        assert seen == [list(b.items()) for b in chain_buckets(DIM, BUCKET_MB, way="compiled", compressed=True)]


@pytest.mark.long
@pytest.mark.parametrize(("case", "first_layer"), [("checkpoint", 1), ("cpu", 0)])
def test_a_compiled_backward_pass_computes_the_first_layer_again_if_it_is_a_checkpoint(ranks, case, first_layer):
    for _, _, program in ranks(2)(compiled_wire, "coalesced", True, case):
        assert program.count(".addmm(") == first_layer, "with its bias; no gradient has one"
        assert program.count(".mm(") == 4 + 3, "gradients of four weights and three inputs"


def settings():
    """What ``fused``, DDP and ``generated_code`` change."""
    inductor = torch._inductor.config
    return (
        inductor._fuse_ddp_communication,
        inductor._fuse_ddp_bucket_size,
        list(inductor._fuse_ddp_communication_passes),
        inductor.reorder_for_locality,
        inductor.fx_graph_cache,
        torch._dynamo.config.optimize_ddp,
        torch._dynamo.compiled_autograd.compiled_autograd_enabled,
        "torch.nn.parallel.distributed" in trace_rules.LEGACY_MOD_INLINELIST,
        counters["inductor"]["ddp_buckets"],
        GraphLowering.save_output_code,
    )


def settings_around(fails):
    counters["inductor"]["ddp_buckets"] = 7
    before, inside = settings(), ()
    try:
        lab = LinearChain(4)
        with ddp.apply_technique(lab, mesh(), "compiled_ddp", ddp.DDP_CASES["cpu"], bucket_mb=3.0):
            inside = settings()
            if fails:
                raise RuntimeError("on purpose")
    except RuntimeError:
        assert fails
    after = settings()
    del counters["inductor"]["ddp_buckets"]
    return [a == b for a, b in zip(before, inside, strict=True)], before == after


@pytest.mark.parametrize("fails", [False, True])
def test_all_settings_are_put_back(ranks, fails):
    for same_inside, restored in ranks(2)(settings_around, fails):
        assert not any(same_inside), "else this test looks at nothing"
        assert restored


def sync_after_failure():
    """Whether replicate averages again after a batch without communication that failed."""
    lab = LinearChain(4)
    model = ddp.apply_replicate(lab, mesh())
    with pytest.raises(ZeroDivisionError), ddp.gradient_sync(model, False):
        _ = 1 / 0
    with CommunicationCounter() as counter:
        model(*lab.get_input(CPU)).sum().backward()
    return counter.bytes["all_reduce"]


def test_communication_is_on_again_after_a_failure(ranks):
    assert ranks(2)(sync_after_failure) == [4 * 4 * 20] * 2


def test_buckets_are_counted_since_the_last_call(monkeypatch):
    monkeypatch.setitem(counters["inductor"], "ddp_buckets", 3)
    assert [ddp.pop_bucket_count(), ddp.pop_bucket_count()] == [3, 0]


def test_a_bucket_that_brings_something_else_is_an_error():
    gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    assert match_gradients([torch.tensor([3.0, 1.0, 2.0])], dict(gradients), "bucket 0") == {"b": 4, "a": 8}
    assert match_gradients([torch.tensor([1.0, 2.0], dtype=torch.bfloat16)], dict(gradients), "bucket 0") == {"a": 4}
    with pytest.raises(ValueError, match="bucket 1 brought 8 bytes that are in no gradient of a, b"):
        match_gradients([torch.tensor([3.0, 5.0])], {**gradients, "b": torch.tensor([4.0])}, "bucket 1")


def order_of_a_second_step():
    model = torch.nn.parallel.DistributedDataParallel(LinearChain(8), bucket_cap_mb=1e-6)
    seen = ddp.note_order(model)
    for _ in range(2):
        seen.clear()
        model(torch.full((4, 8), 1.0 + dist.get_rank())).sum().backward()
    return seen, model.module.fc4.weight.grad


def test_gradients_and_buckets_are_noted_in_their_order_and_averaged_as_without(ranks):
    (seen, gradient), (others, same) = ranks(2)(order_of_a_second_step)
    gradients = [name.removesuffix(".weight") for name, _ in chain_gradients(8)]
    assert [event for event in seen if "leaves" not in event] == gradients
    assert seen[1] == "[bucket 0 leaves]" and seen.count("[bucket 7 leaves]") == 1 and seen == others
    assert torch.equal(gradient, same)


def test_the_backward_programs_of_a_loss_are_those_of_its_compiled_pieces_in_the_order_of_running():
    first, second = (torch.compile(torch.nn.Linear(4, 4), backend="aot_eager") for _ in range(2))
    loss = second(torch.relu(first(torch.ones(2, 4)))).sum()
    programs, ran = ddp.backward_programs(loss), []
    for name, program in zip(("second", "first"), programs, strict=True):
        program.register_prehook(lambda _, name=name: ran.append(name))
    loss.backward()
    assert ran == ["second", "first"]
    assert ddp.backward_programs(torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum()) == []
