"""labkit_course.checks.ddp: other right ways pass, and what the checks take for right is what PyTorch does.

The notebook's own answers and wrong ones are in tests/test_exercises.py.
"""

from pathlib import Path

import pytest
from answers import ddp, ddp_at_work
from test_exercises import source_of

from labkit import inductor
from labkit.theory import ddp as theory
from labkit.theory import emulated_steps
from labkit_course import bucket_lines
from labkit_course.checks import ddp as checks
from labkit_course.checks import ddp_at_work as at_work

DATA = Path(__file__).parent / "data"
IMPORTS = "import torch\nfrom torch import distributed as dist\nfrom torch import nn\n\n\n"
OTHER_WAYS = {
    "a set of what is there": (
        checks.send_full_buckets,
        "def send(buckets, finish):",
        """
there, flights = set(), []

def arrived(parameter):
    there.add(parameter)
    for bucket in buckets:
        if parameter in set(bucket) and there.issuperset(bucket):
            flat = nn.utils.parameters_to_vector([each.grad for each in bucket])
            flights.append([list(bucket), flat, dist.all_reduce(flat, async_op=True)])
    if len(flights) == len(buckets):
        finish(list(flights))
        there.clear()
        flights.clear()

for bucket in buckets:
    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(arrived)
""",
    ),
    "copied only from outside the row": (
        checks.put_into_row,
        "def put(bucket, views):",
        """
for each, view in zip(bucket, views):
    if each.grad.data_ptr() != view.data_ptr():
        view[...] = each.grad
        each.grad = view
""",
    ),
    "the last micro-batch first, and a sum divided at the end": (
        checks.accumulate,
        "def accumulate(model, batches):",
        """
for index, (inputs, targets) in enumerate(batches):
    model.require_backward_grad_sync = index == len(batches) - 1
    nn.functional.mse_loss(model(inputs), targets, reduction="sum").backward()
for parameter in model.parameters():
    parameter.grad /= sum(targets.numel() for _, targets in batches)
""",
    ),
    "divided after, copied into the bucket": (
        at_work.half_hook,
        "def hook(state, bucket):",
        """
half = bucket.buffer().bfloat16()
future = dist.all_reduce(half, async_op=True).get_future()
return future.then(lambda done: bucket.buffer().copy_(done.value()[0]).div_(dist.get_world_size()))
""",
    ),
}


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_another_right_way_passes(name, answer_to):
    check, head, body = OTHER_WAYS[name]
    verdict = check(answer_to(head, body, IMPORTS))
    assert verdict.ok, verdict


@pytest.mark.usefixtures("ranks_at_hand")
def test_a_backward_pass_alone_in_no_sync_sends_as_ever(answer_to):
    body = """
for inputs, targets in batches[:-1]:
    loss = nn.functional.mse_loss(model(inputs), targets) / len(batches)
    with model.no_sync():
        loss.backward()
(nn.functional.mse_loss(model(batches[-1][0]), batches[-1][1]) / len(batches)).backward()
"""
    verdict = checks.accumulate(answer_to("def accumulate(model, batches):", body, IMPORTS))
    assert "every backward pass sent its gradients" in repr(verdict)


# Messages besides the hook's own, of 400 bytes, out of sight of a dispatch mode in the hook's thread.
HIDDEN = {
    "in a thread": "thread = threading.Thread(target=dist.broadcast, args=(row, 0))\nthread.start()\nthread.join()",
    "by the group's own method": "dist.group.WORLD.broadcast([row], dist.BroadcastOptions()).wait()",
    "by the backend's own method": (
        "backend = dist.group.WORLD._get_backend(torch.device('cpu'))\n"
        "backend.broadcast([row], dist.BroadcastOptions()).wait()"
    ),
    "without dispatch modes": "with _disable_current_modes():\n    dist.broadcast(row, 0)",
    "in a group of its own": "dist.broadcast(row, 0, group=dist.new_group())",
}
HOOK = """
half = bucket.buffer().bfloat16() / dist.get_world_size()
row = torch.ones(100)
{hidden}
return dist.all_reduce(half, async_op=True).get_future().then(lambda done: done.value()[0].float())
"""
MORE_IMPORTS = f"import threading\nfrom torch.utils._python_dispatch import _disable_current_modes\n{IMPORTS}"


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("way", HIDDEN)
def test_a_message_out_of_sight_is_counted(way, answer_to):
    hook = answer_to("def hook(state, bucket):", HOOK.format(hidden=HIDDEN[way]), MORE_IMPORTS)
    verdict = at_work.half_hook(hook)
    said = "on rank 0, the gradients are right, but the rank sends 1 broadcast call with 400 bytes besides"
    assert (verdict.detail, verdict.expected) == (said, "1 all_reduce call with 346 bytes")


def test_on_launched_ranks_a_right_hook_passes_and_one_for_two_ranks_does_not(answer_to):
    head, body = "def hook(state, bucket):", HOOK.format(hidden="")
    verdict = at_work.half_hook(answer_to(head, body, IMPORTS))
    assert verdict.ok, verdict
    verdict = at_work.half_hook(answer_to(head, body.replace("dist.get_world_size()", "2"), IMPORTS))
    said = "right on 2 ranks, but with 3 ranks: on rank 0, the gradient of parameter 0 is the sum, divided by 2"
    assert (verdict.detail, verdict.hint) == (said, "Divide by dist.get_world_size().")


@pytest.fixture
def solved(answer_to):
    """The notebook's own answer to an exercise."""

    def made(function):
        (exercise,) = (each for each in [*ddp.EXERCISES, *ddp_at_work.EXERCISES] if each.function == function)
        imports, text = source_of(exercise)
        head, solution = text.split("### BEGIN SOLUTION")
        return answer_to(head.rstrip(), f"    ### BEGIN SOLUTION{solution}", imports)

    return made


@pytest.mark.parametrize("program", ["ddp_coalesced", "ddp_concat", "ddp_coalesced_again", "ddp_concat_again"])
def test_the_reader_of_early_uses_finds_each_missing_wait_in_programs_of_the_compiler(program, solved):
    early_uses, code = solved("early_uses"), (DATA / f"{program}.py.txt").read_text()
    lines = inductor.parse_lines(code)
    waits = [line for line in lines if line.kind == "wait"]
    assert early_uses(lines) == [] == inductor.missing_waits(code)
    assert waits
    for wait in waits:
        assert early_uses([line for line in lines if line is not wait]), wait
        assert inductor.missing_waits(code.replace(wait.text, "pass")), wait


@pytest.mark.parametrize("bucket_mb", [1, 5, 100])
@pytest.mark.parametrize("dim", [64, 1000, 2000])
def test_the_plans_of_exercise_1_are_ddps(dim, bucket_mb, solved):
    gradients = theory.chain_gradients(dim)
    planned = solved("bucket_plan")([size for _, size in gradients], bucket_mb * 2**20)
    buckets = theory.chain_buckets(dim, bucket_mb)
    assert [[gradients[place][0] for place in bucket] for bucket in planned] == list(map(list, buckets))


@pytest.mark.parametrize("bucket_mb", [0.0001, 0.1, 100])
def test_the_formula_of_lab_4_is_the_emulated_steps_theory(bucket_mb, solved):
    chain, backward_ms = {"dim": 128, "layers": 24}, 240
    sizes = [size for _, size in theory.chain_gradients(**chain)]
    ready = [backward_ms / 24 * (place // 2 + 1) for place in range(48)]
    plan, arrivals = map(solved, ("bucket_plan", "arrivals"))
    end_ms = arrivals(plan(sizes, bucket_mb * 2**20), sizes, ready, 15, 120 / sum(sizes))[-1]
    hardware = emulated_steps.ddp_hardware(3, alpha_ms=15, bytes_ms=120, backward_ms=backward_ms, **chain)
    step_s = emulated_steps.ddp_step_s(hardware, 3, bucket_mb=bucket_mb, **chain)
    assert end_ms == pytest.approx(1e3 * step_s)


HALF = "half = bucket.buffer().bfloat16() / dist.get_world_size()\n"
ASKED = f"{HALF}handle = dist.all_reduce(half, async_op=True)\n"
READY = "future = torch.futures.Future()\nfuture.set_result(half.float())\nreturn future"
WAITS = "on rank 0, the gradients are right, but the hook waits for its all-reduce before it returns"
SLIPS = {
    "blocks": (f"{HALF}dist.all_reduce(half)\n{READY}", WAITS),
    "waits for the handle": (f"{ASKED}handle.wait()\n{READY}", WAITS),
    "waits for the future": (f"{ASKED}handle.get_future().wait()\n{READY}", WAITS),
    "the handle's future": (f"{ASKED}return handle.get_future()", "the future holds a list of 1 tensor"),
    "float of the list": (
        f"{ASKED}return handle.get_future().then(lambda future: future.value().float())",
        "the function in .then(…) raised AttributeError: 'list' object has no attribute 'float'",
    ),
    "nothing comes of it": (
        f"{ASKED}return handle.get_future().then(lambda future: None)",
        "the future holds NoneType, not a tensor",
    ),
}


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_of_a_hook_is_named_in_one_line(name, answer_to):
    body, said = SLIPS[name]
    verdict = at_work.half_hook(answer_to("def hook(state, bucket):", body, IMPORTS))
    assert verdict.detail.startswith(said), verdict
    assert len(verdict.detail) < 160


def test_a_bucket_without_room_for_latencies_is_infinite():
    def divides(total_bytes, backward_s, alpha_s, beta_s_per_byte):
        room = backward_s - total_bytes * beta_s_per_byte
        return float("inf") if room < 0 else total_bytes * alpha_s / room

    assert "ZeroDivisionError" in at_work.smallest_bucket(divides).detail


def test_a_buffer_that_never_lands_is_told_about_its_wait():
    def never_lands(lines):
        in_flight, found = set(), []
        for line in lines:
            if line.kind != "wait" and in_flight & set(line.buffers):
                found.append(line.number)
            if line.kind == "collective":
                in_flight |= set(line.buffers)
        return found

    assert "after its wait" in at_work.early_uses(never_lands).hint


def test_the_time_lines_of_lab_4_have_three_faults(solved):
    plan, arrivals = map(solved, ("bucket_plan", "arrivals"))
    lines = bucket_lines.LINES
    assert [(line.end_ms(), line.late_bucket) for line in lines.values()] == [(198, 1), (234, None), (244, 0)]
    assert [line.best_ms() for line in lines.values()] == [174, 176, 241], "only the third gains nothing by a size"
    for line in lines.values():
        sizes, ready = [line.layer_mib] * line.layers, [line.ready_ms(layer) for layer in line.order]
        for size in (line.layer_mib, 3 * line.layer_mib):
            ends = arrivals(plan(sizes, size), sizes, ready, line.alpha_ms, line.beta_ms)
            assert ends[-1] == line.end_ms(size), "the learner's own functions answer the exercise"


def test_as_one_graph_all_messages_of_lab_4_follow_the_backward_pass():
    chain = {"dim": 600, "layers": 6}
    wire = emulated_steps.ddp_hardware(3, alpha_ms=15, bytes_ms=60, forward_ms=60, backward_ms=180, **chain)
    found = bucket_lines.compiled_steps_ms(wire, 3, bucket_mb=1.0, **chain)
    assert [round(each) for each in found.values()] == [265, 280, 405, 315]
