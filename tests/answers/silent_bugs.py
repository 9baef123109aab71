"""Lab 7b."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import silent_bugs as checks

changed = functools.partial(answers.changed, "07b")


def exercise(number, room, wrong):
    return Exercise(f"7b.{number}", f"mended_{room}", functools.partial(checks.mended, room=room), wrong)


TOTAL = ("return total(loss) / dist.get_world_size()", "return loss / dist.get_world_size()")
NO_LOSS = ("return loss.detach()", "return None")
MEAN = "weight.grad /= dist.get_world_size()"

EXERCISES = [
    exercise(
        1,
        "tokens",
        {
            "the gradient of embed is off": changed("mended_tokens", ("copy_to_ranks(tokens) @", "tokens @")),
            "the gradient of up is 2 times the right one": changed(
                "mended_tokens", ("loss.backward()", "loss.backward()\nweights['up'].grad *= 2")
            ),
            "the gradients are right, but the step returned a NoneType": changed("mended_tokens", NO_LOSS),
        },
    ),
    exercise(
        2,
        "router",
        {
            "the gradient of gate is off": changed("mended_router", ("copy_to_ranks(scores)", "scores")),
            "the gradient of gate is 2 times the right one": changed(
                "mended_router", ("loss.backward()", "loss.backward()\ndist.all_reduce(weights['gate'].grad)")
            ),
            "the gradients are right, but the step returned a NoneType": changed("mended_router", NO_LOSS),
        },
    ),
    exercise(
        3,
        "gathered",
        {
            "the gradient of text is off": changed(
                "mended_gathered",
                ("gather_from_ranks(texts)", "gather_from_ranks(texts.detach())"),
                ("loss.backward()", "(loss + 0.0 * texts.sum()).backward()"),
            ),
            "the gradient of picture is 2 times the right one": changed("mended_gathered", (MEAN, "pass")),
            "right on 2 ranks, but with 3 ranks: the gradient of picture is 1.5 times the right one": changed(
                "mended_gathered", (MEAN, "weight.grad /= 2")
            ),
        },
    ),
    exercise(
        4,
        "extra",
        {
            "the gradient of trunk is off": changed(
                "mended_extra", ('weights["extra"].T, second)', 'weights["extra"].T, second) / dist.get_world_size()')
            ),
            "the gradient of trunk is 2 times the right one": changed("mended_extra", (MEAN, "pass")),
            "the gradients are right, but the step returned 1": changed("mended_extra", TOTAL),
        },
    ),
    exercise(
        5,
        "clip",
        {
            "the gradient of up is 1.09 times the right one": changed(
                "mended_clip", ('total(squares["up"] + squares["down"])', '(squares["up"] + squares["down"])')
            ),
            "the gradient of up is 0": changed(
                "mended_clip",
                ('(total(squares["up"] + squares["down"]) + squares["head"])', "total(sum(squares.values()))"),
            ),
            "the gradients are right, but the step returned a NoneType": changed("mended_clip", NO_LOSS),
        },
    ),
    exercise(
        6,
        "tied",
        {
            "the gradient of words is off": changed("mended_tied", ('dist.all_reduce(weights["words"].grad)', "pass")),
            "the gradient of words is 0.5 times the right one": changed(
                "mended_tied", ("return total(loss)", 'weights["words"].grad /= 2\nreturn total(loss)')
            ),
            "the gradients are right, but the step returned 0": changed(
                "mended_tied", ("return total(loss)", "return loss")
            ),
        },
    ),
    exercise(
        7,
        "accumulate",
        {
            "the gradient of first is off": changed(
                "mended_accumulate",
                (
                    "    logged += total(loss)\n",
                    "    logged += total(loss)\n    [dist.all_reduce(weight.grad) for weight in weights.values()]\n",
                ),
                ("for weight in weights.values():\n    dist.all_reduce(weight.grad)\nreturn", "return"),
            ),
            "the gradient of first is 2 times the right one": changed(
                "mended_accumulate", (" / len(targets)", " / (len(targets) / 2)")
            ),
            "the gradients are right, but the step returned a NoneType": changed(
                "mended_accumulate", ("return logged", "return None")
            ),
        },
    ),
    exercise(
        8,
        "unwaited",
        {
            "the gradient of first is off": changed("mended_unwaited", ("handle.wait()\n", "")),
            "the gradient of first is 2 times the right one": changed(
                "mended_unwaited", ("row / dist.get_world_size()", "row")
            ),
            "right on 2 ranks, but with 3 ranks: the gradient of first is 1.5 times the right one": changed(
                "mended_unwaited", ("row / dist.get_world_size()", "row / 2")
            ),
        },
    ),
    exercise(
        9,
        "bfloat",
        {
            "the gradient of first is off": changed(
                "mended_bfloat",
                (
                    "dist.all_reduce(weight.grad)",
                    "weight.grad = weight.grad.bfloat16().float()\n    dist.all_reduce(weight.grad)",
                ),
            ),
            "first has no gradient": changed(
                "mended_bfloat",
                ("loss.backward()", 'loss.backward()\nweights["first"].grad = None'),
                ("for weight in weights.values()", 'for weight in [weights["last"]]'),
            ),
            "the gradient of first is 0.5 times the right one": changed(
                "mended_bfloat",
                (
                    "dist.all_reduce(weight.grad)",
                    "dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)\n    weight.grad /= 2",
                ),
            ),
        },
    ),
]
