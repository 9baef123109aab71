"""labkit.checks.ddp: other right ways pass, and what the checks take for right is what PyTorch does.

The notebook's own answers and wrong ones are in tests/test_exercises.py.
"""

from pathlib import Path

import pytest
from answers.ddp import EXERCISES
from test_exercises import source_of

from labkit import inductor
from labkit.checks import ddp as checks
from labkit.theory import ddp as theory

DATA = Path(__file__).parent / "data"
IMPORTS = "import torch\nfrom torch import distributed as dist\nfrom torch import nn\n\n\n"
OTHER_WAYS = {
    "copied back, divided before": (
        checks.small_ddp,
        "def small(model, bucket_bytes):",
        """
buckets, held = [[]], 0
for parameter in reversed(list(model.parameters())):
    if held >= bucket_bytes:
        buckets.append([])
        held = 0
    buckets[-1].append(parameter)
    held += parameter.nbytes
there, flights = set(), {}

def arrived(parameter):
    there.add(parameter)
    for index, bucket in enumerate(buckets):
        if index not in flights and there.issuperset(bucket):
            flat = nn.utils.parameters_to_vector([each.grad / dist.get_world_size() for each in bucket])
            flights[index] = flat, dist.all_reduce(flat, async_op=True)
    if len(flights) == len(buckets):
        for index, (flat, handle) in flights.items():
            handle.wait()
            start = 0
            for each in buckets[index]:
                each.grad.copy_(flat[start : start + each.numel()].view_as(each))
                start += each.numel()
        there.clear()
        flights.clear()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(arrived)
""",
    ),
    "the last micro-batch first, and a sum divided at the end": (
        checks.accumulate,
        "def accumulate(model, batches):",
        """
for index, (inputs, targets) in enumerate(batches):
    model.require_backward_grad_sync = index == len(batches) - 1
    nn.functional.mse_loss(model(inputs), targets).backward()
for parameter in model.parameters():
    parameter.grad /= len(batches)
""",
    ),
    "divided after, copied into the bucket": (
        checks.half_hook,
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
    verdict = checks.half_hook(hook)
    said = "on rank 0, the gradients are right, but the rank sends 1 broadcast call with 400 bytes besides"
    assert (verdict.detail, verdict.expected) == (said, "1 all_reduce call with 346 bytes")


def test_on_launched_ranks_a_right_hook_passes_and_one_for_two_ranks_does_not(answer_to):
    head, body = "def hook(state, bucket):", HOOK.format(hidden="")
    verdict = checks.half_hook(answer_to(head, body, IMPORTS))
    assert verdict.ok, verdict
    verdict = checks.half_hook(answer_to(head, body.replace("dist.get_world_size()", "2"), IMPORTS))
    said = "right on 2 ranks, but with 3 ranks: on rank 0, the gradient of parameter 0 is the sum, divided by 2"
    assert (verdict.detail, verdict.hint) == (said, "Divide by dist.get_world_size().")


@pytest.fixture
def solved(answer_to):
    """The notebook's own answer to an exercise."""

    def made(function):
        (exercise,) = (each for each in EXERCISES if each.function == function)
        imports, text = source_of(exercise)
        head, solution = text.split("### BEGIN SOLUTION")
        return answer_to(head.rstrip(), f"    ### BEGIN SOLUTION{solution}", imports)

    return made


@pytest.mark.parametrize("program", ["ddp_coalesced", "ddp_concat", "ddp_coalesced_again", "ddp_concat_again"])
def test_the_reader_of_exercise_9_finds_each_missing_wait_in_programs_of_the_compiler(program, solved):
    early_uses, code = solved("early_uses"), (DATA / f"{program}.py.txt").read_text()
    lines = inductor.parse_lines(code)
    waits = [line for line in lines if line.kind == "wait"]
    assert early_uses(lines) == [] == inductor.missing_waits(code)
    assert waits
    for wait in waits:
        assert early_uses([line for line in lines if line is not wait]), wait
        assert inductor.missing_waits(code.replace(wait.text, "pass")), wait


@pytest.mark.parametrize("bucket_mb", [1, 5, 25, 100])
@pytest.mark.parametrize("dim", [64, 1000, 2000])
def test_the_plans_of_exercise_2_are_those_of_the_compiled_chain_and_of_ddps(dim, bucket_mb, solved):
    plan = solved("bucket_plan")
    for way, first_mb in (("compiled", 1), ("eager", 1 if bucket_mb == 25 else bucket_mb)):
        gradients = theory.chain_gradients(dim, way)
        planned = plan([size for _, size in gradients], bucket_mb, first_mb)
        buckets = theory.chain_buckets(dim, bucket_mb, way=way)
        assert [[gradients[place][0] for place in bucket] for bucket in planned] == list(map(list, buckets))
