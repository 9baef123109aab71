"""labkit_course.checks.fsdp: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import dataclasses

import pytest
from fixture_long import long_but

import labkit
from labkit.theory import fsdp as theory
from labkit_course.checks import fsdp as checks
from labkit_course.checks import fsdp_at_work as at_work

IMPORTS = "import torch\nfrom torch import distributed as dist\nfrom torch import nn\n\n\n"
HEADS = {
    "fewest_ranks": "def ranks(parameters: int, largest_unit: int, memory_bytes: int) -> int:",
    "shard_model": "def wrap(model: nn.Module, group: int) -> None:",
    "expert_gradients": "def average_gradients(model: nn.Module, experts: set[nn.Parameter], ranks: int) -> None:",
}
SOLUTIONS = {
    "fewest_ranks": """
        left = memory_bytes - 8 * largest_unit
        return -(-16 * parameters // left) if left > 0 else 0
    """,
}


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, with the signature of a check's exercise."""
    return lambda check, body: answer_to(HEADS[check], body, IMPORTS)


@pytest.fixture(scope="module")
def planned():
    """A run of fsdp_wrap whose blocks are all units."""
    return labkit.run("fsdp_wrap", nproc=2, wrap="block", model="mlp_stack", dim=128, batch=64, steps=1)


@pytest.fixture(scope="module")
def forgetful():
    """A run of fsdp_matrix that leaves out one block of nine."""
    return labkit.run("fsdp_matrix", nproc=2, model="toy", skip=(1,), steps=1)


def judge(check, given):
    return getattr(checks if hasattr(checks, check) else at_work, check)(given)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("check", SOLUTIONS)
def test_solution_passes(check, answer):
    assert judge(check, answer(check, SOLUTIONS[check])).state == "passed"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("check", HEADS)
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""'])
def test_an_empty_answer_is_not_attempted(check, body, answer):
    assert repr(judge(check, answer(check, body))) == "not attempted"


def changed(check, old, new):
    """A solution with one thing wrong."""
    assert SOLUTIONS[check].count(old) == 1
    return SOLUTIONS[check].replace(old, new)


WRONG_ANSWERS = {
    "fewest_ranks": [
        ("return 2", "memory_bytes=16800) gave 2, expected 1. More ranks make the shares smaller"),
        (changed("fewest_ranks", " - 8 * largest_unit", ""), "memory_bytes=5600) gave 3, expected 5. At the peak"),
        (changed("fewest_ranks", "8 *", "4 *"), "memory_bytes=5600) gave 4, expected 5. At the peak"),
        (changed("fewest_ranks", "-(-16 * parameters // left)", "16 * parameters // left"),
         "memory_bytes=9000) gave 2, expected 3. A part of a rank"),
        (changed("fewest_ranks", " if left > 0 else 0", ""), "gave -16, expected 0. More ranks do not make"),
        ("total = 16 * parameters", "gave None, not a"),
    ],
}  # fmt: skip


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("check", "body", "reason"), [(check, *each) for check, answers in WRONG_ANSWERS.items() for each in answers]
)
def test_a_wrong_answer_fails_with_the_reason_and_launches_nothing(check, body, reason, answer):
    verdict = judge(check, answer(check, body))
    assert verdict.state == "wrong"
    assert reason in repr(verdict)


def test_the_bytes_of_a_run_tell_the_forgotten_block(forgetful):
    """What the hint says is enough to find it."""
    sizes = {"hidden": 256, "narrow": 64}
    gathered = [
        theory.step_collectives(theory.toy_layers("block", **sizes, skip=skip), 2)["all_gather_bytes"]
        for skip in ((), (0,), (1,), (2,))
    ]
    assert [index for index, each in enumerate(gathered) if each == forgetful.value("all_gather_bytes")] == [2]


def test_counting_collectives_shows_a_block_that_was_not_wrapped(planned, forgetful):
    whole, partial = at_work.every_block_wrapped(planned, 3), at_work.every_block_wrapped(forgetful, 9)
    assert repr(whole) == (
        "passed: units beside the root: 3 (6 all-gathers less 3 reduce-scatters), one for each block"
    )
    assert repr(partial) == (
        "wrong: units beside the root: 8 (17 all-gathers less 9 reduce-scatters), expected 9. "
        "One block stayed with the root."
    )
    assert at_work.every_block_wrapped(planned, 5).hint == "2 blocks stayed with the root."
    assert at_work.every_block_wrapped(planned, 2).hint == "More than the blocks was wrapped."
    keeping = dataclasses.replace(planned, info={"params": planned.params | {"reshard_after_forward": False}})
    with pytest.raises(ValueError, match="reshard_after_forward = False gathers every unit once"):
        at_work.every_block_wrapped(keeping, 3)


OWN = "expected this rank's own, divided by the ranks"
MEAN = "expected the mean over the ranks"

# Answers on two ranks, and a part of what their learner is told.
ANSWERS = {
    "right": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
""",
        "passed",
    ),
    "right_in_one_message": (
        """
    for parameter in model.parameters():
        parameter.grad /= ranks
    shared = [parameter for parameter in model.parameters() if parameter not in experts]
    flat = torch.cat([parameter.grad.flatten() for parameter in shared])
    dist.all_reduce(flat)
    for parameter, mean in zip(shared, flat.split([parameter.numel() for parameter in shared])):
        parameter.grad = mean.view_as(parameter)
""",
        "passed",
    ),
    "right_in_two_halves": (
        """
    shared = [parameter for parameter in model.parameters() if parameter not in experts]
    for parameter in model.parameters():
        parameter.grad /= ranks
    flat = torch.cat([parameter.grad.flatten() for parameter in shared])
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % ranks)])
    part = flat.new_empty(len(flat) // ranks)
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    for parameter in shared:
        parameter.grad = flat[: parameter.numel()].view_as(parameter)
        flat = flat[parameter.numel() :]
""",
        "passed",
    ),
    "gathered_from_all": (
        """
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(ranks)]
        if parameter not in experts:
            dist.all_gather(everyone, parameter.grad)
            parameter.grad = sum(everyone)
        parameter.grad /= ranks
""",
        "right on 2 ranks, but with 3 ranks: on rank 0, the gradients are right, but the rank sends 6 all_gather calls",
    ),
    "more_in_a_thread": (
        """
    import threading
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    thread = threading.Thread(target=dist.all_reduce, args=(torch.zeros(3),))
    thread.start()
    thread.join()
""",
        "on rank 0, the gradients are right, but the rank sends 7 all_reduce calls with 2,056 bytes, expected an all-",
    ),
    "everything_averaged": (
        """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
""",
        f"on rank 0, the expert's gradient of net.2.weight is averaged, {OWN}",
    ),
    "summed": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
""",
        f"on rank 0, the shared gradient of net.0.weight is summed and not divided, {MEAN}",
    ),
    "experts_averaged_instead": (
        """
    for parameter in model.net[2].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
""",
        f"on rank 0, the shared gradient of net.0.weight is still this rank's own, {MEAN}",
    ),
    "nothing_sent": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            parameter.grad /= ranks
""",
        f"on rank 0, the shared gradient of net.0.weight is divided but not summed, {MEAN}",
    ),
    "experts_left_alone": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        f"on rank 0, the expert's gradient of net.2.weight is still this rank's own, {OWN}",
    ),
    "only_weights": (
        """
    for parameter in model.parameters():
        if parameter not in experts and parameter.dim() == 2:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        f"on rank 0, the shared gradient of net.0.bias is still this rank's own, {MEAN}",
    ),
    "gradients_of_experts_dropped": (
        """
    for parameter in model.parameters():
        if parameter in experts:
            parameter.grad = None
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        "on rank 0, the expert's gradient of net.2.weight is gone",
    ),
    "parameters_instead_of_gradients": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.data)
            parameter.data /= ranks
""",
        f"on rank 0, the shared gradient of net.0.weight is still this rank's own, {MEAN}",
    ),
    "sent_by_one_rank": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.broadcast(parameter.grad, 0)
""",
        f"on rank 0, the shared gradient of net.0.weight is still this rank's own, {MEAN}",
    ),
    "error": ("\n    model.mean()\n", "on rank 0, AttributeError: 'MixtureOfExperts' object has no attribute 'mean'"),
}  # fmt: skip

ONE_LESS = """
    for index, parameter in enumerate(model.parameters()):
        if parameter not in experts and not (dist.get_rank() == 1 and index == {}):
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
"""
ONE_MORE = (
    ANSWERS["right"][0]
    + """
    if dist.get_rank() == 1:
        dist.all_reduce(torch.zeros(3))
"""
)
# Answers in which the ranks do not send alike, for a launch of their own, and a part of the verdict.
UNEQUAL = {
    "first_missing": (ONE_LESS.format(0), "the ranks sent tensors of different sizes to each other: does"),
    "last_missing": (ONE_LESS.format(7), "on rank 1, the shared gradient of net.3.bias is divided but not summed"),
    "one_more": (ONE_MORE, "rank 1 waited for rank 0, which was done: does every rank call the same"),
}  # fmt: skip


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_on_two_ranks_is_judged_by_what_it_does(name, answer):
    body, expected = ANSWERS[name]
    verdict = at_work.expert_gradients(answer("expert_gradients", body))
    assert verdict.state == ("passed" if expected == "passed" else "wrong")
    assert expected in repr(verdict)


def test_the_right_answer_passes_on_ranks(answer):
    verdict = at_work.expert_gradients(answer("expert_gradients", ANSWERS["right"][0]))
    assert (
        repr(verdict)
        == "passed: as asked on 2 and 3 ranks: shared gradients are the mean, and those of experts their own, divided"
    )


def test_who_divides_by_two_is_right_on_two_ranks_alone(answer):
    body = ANSWERS["right"][0].replace("/= ranks", "/= 2")
    said = "the shared gradient of net.0.weight is the sum over the ranks, divided by 2"
    verdict = at_work.expert_gradients(answer("expert_gradients", body))
    assert repr(verdict).startswith(f"wrong: right on 2 ranks, but with 3 ranks: on rank 0, {said}")


@pytest.mark.parametrize("name", long_but(["first_missing", "one_more"], UNEQUAL))
def test_ranks_that_do_not_call_the_same_all_reduces_are_stopped_with_a_hint(name, answer):
    body, reason = UNEQUAL[name]
    verdict = at_work.expert_gradients(answer("expert_gradients", body))
    assert verdict.state == "wrong"
    assert reason in repr(verdict)
