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
    Exercise(
        "7b.1",
        "parity",
        checks.parity,
        {
            "on rank 0, in the room norm, off by of norm is 0.": changed("parity", ("/ right.norm()", "")),
            "on rank 0, in the room norm, factor of norm is": changed(
                "parity", ("(mine * right).sum() / right.square().sum()", "mine.norm() / right.norm()")
            ),
            "on rank 0, RuntimeError: The size of tensor a": changed(
                "parity", ("part(whole[name], cut[name]) if name in cut else whole[name]", "whole[name]")
            ),
            "on rank 0, KeyError: 'last'": changed(
                "parity",
                ("for name, mine in got.items():", "for name in whole:\n    mine = got[name]"),
            ),
            "on rank 0, in the room norm it gave 0.": changed(
                "parity", ("found[name] = (off_by.item(), factor.item())", "found[name] = off_by.item()")
            ),
        },
    ),
    exercise(
        2,
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
            "the gradient of trunk is off": changed("mended_extra", ("own.clone()", "own")),
            "right on 2 ranks, but with 3 ranks: the gradient of trunk is off": changed(
                "mended_extra", ("own.clone()", "own"), ("* own / everyone", "/ 2")
            ),
            "the gradient of trunk is 0.5 times the right one": changed(
                "mended_extra", ("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad)\n    weight.grad /= 2")
            ),
            "the gradients are right, but the step returned 1": changed(
                "mended_extra", ("return total(loss)", "return loss")
            ),
        },
    ),
    Exercise(
        "7b.5",
        "diagnose",
        checks.diagnosed,
        {
            "diagnose(the table of norm) gave 'factor'": changed(
                "diagnose", ("off_by**2 - (factor - 1) ** 2 < (0.01 * off_by) ** 2", "abs(factor - 1) > 0.1")
            ),
            "diagnose(the table of extra) gave 'terms'": changed("diagnose", ("if any(off_by**2", "if all(off_by**2")),
            "diagnose(the table of smoothing) gave 'terms'": changed("diagnose", ("wrong) < 0.01", "wrong) < 0.001")),
            "diagnose(the table of clip) raised TypeError: '<' not supported": changed(
                "diagnose",
                (
                    "off_by**2 - (factor - 1) ** 2 < (0.01 * off_by) ** 2",
                    "(off_by**2 - (factor - 1) ** 2) ** 0.5 < 0.01 * off_by",
                ),
            ),
            "diagnose(the table of a count of one token too many) gave 'small'": changed(
                "diagnose", ("if any(off_by**2", "if any(off_by > 0.01 and off_by**2")
            ),
            "diagnose(the table of smoothing on three ranks) raised TypeError": changed(
                "diagnose", ("(differ or 0)", "differ")
            ),
        },
    ),
    Exercise(
        "7b.6",
        "declared",
        checks.declared,
        {
            "declared('tokens'): inputs is R, so a rank's gradient is a term": changed(
                "declared", ('"I" if room == "tokens" else "R"', '"R"')
            ),
            "declared('norm'): inputs is I, so its gradient is the same": changed(
                "declared", ('"I" if room == "tokens" else "R"', '"I"')
            ),
            "declared('tokens'): up is 'P'": changed("declared", ('"up": "V"', '"up": "P"')),
            "declared('norm') says nothing of norm": changed(
                "declared", ('("inputs", "norm", "head")', '("inputs", "head")')
            ),
        },
    ),
]
