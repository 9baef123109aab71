"""labkit_course.checks.extensions: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import textwrap

import answers
import pytest
import torch

import labkit
from labkit_course.checks import extensions, extensions_at_work
from labkit_course.hook_costs import own_bytes

IMPORTS = "import torch\nfrom labkit.tensors import TwoTensor, pad_rows, refill\n\n\n"
HOOK = "def hook(all_gather_outputs, metadata, param_dtype, *, out=None):"
HEADS = {
    "post_all_gather": HOOK.replace("(", "(self, ", 1),
    "both_hooks": "def add_hooks(shard, rows, encode, decode):",
    "encode": "def encode(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:",
    "decode": "def decode(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:",
}
TWO = """
    a, b = all_gather_outputs
    if out is None:
        whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    if a.dtype != param_dtype:
        refill(out.a, a)
        refill(out.b, b)
"""
BOTH = textwrap.indent(answers.changed("03", "add_hooks"), "    ")
BF16 = ("return (shard.bfloat16(),)", "return gathered[0].to(dtype)")
ROWS = """
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (shard / scales).round().to(torch.int8), scales
"""
UNSCALE = "return (gathered[0].float() * gathered[1]).to(dtype)"
IN_FLOAT32 = """
    a, b = all_gather_outputs
    if out is None:
        return type(self)(a, b), (a, b)
"""
FLOAT8 = """
    scale = shard.abs().amax() / 448
    return (shard / scale).to(torch.float8_e4m3fn), scale.reshape(1)
"""
FLOAT8_ROWS = """
    scales = shard.abs().amax(dim=1, keepdim=True) / 448
    return (shard / scales).to(torch.float8_e4m3fn), scales
"""
NIBBLES = """
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
    numbers = ((shard / scales).round() + 8).to(torch.uint8)
    return numbers[:, ::2] * 16 + numbers[:, 1::2], scales
"""
UNPACK = """
    packed, scales = gathered
    numbers = torch.stack([packed // 16, packed % 16], dim=2).flatten(1)
    return ((numbers.float() - 8) * scales).to(dtype)
"""
UNSCALE_SHARDS = """
    numbers, scales = gathered
    by_rank = numbers.float().view(len(scales), -1)
    return (by_rank * scales[:, None]).view(numbers.shape).to(dtype)
"""


def changed(solution, old, new):
    """A solution with one thing different."""
    assert solution.count(old) == 1
    return solution.replace(old, new)


# Solutions with something changed, and for each a part of what its learner is told; "" where it is right all the same.
HOOKS = {
    "two_tensor": {
        "right": (TWO, TWO, ""),
        "always_refilled": ("if a.dtype != param_dtype:", "if out.a.data_ptr() != a.data_ptr():", ""),
        "nothing": (TWO, "a, b = all_gather_outputs", "on the first call the hook gave NoneType, not two things"),
        "only_the_parameter": ("return whole, (whole.a, whole.b)", "return whole", "the hook gave TwoTensor, not two"),
        "halves_as_they_are": ("return whole,", "return (a, b),", "gave tuple, tuple, not two things, a TwoTensor and"),
        "one_tensor_to_free": ("(whole.a, whole.b)", "whole.a", "the second part of the answer must be a tuple of"),
        "not_cast": ("TwoTensor(a.to(param_dtype), b.to(param_dtype))", "TwoTensor(a, b)",
                     "the parameter is (52, 64) in torch.float32, not (52, 64) in torch.bfloat16"),
        "padding_cut": ("a, b = all_gather_outputs", "a, b = (each[:51] for each in all_gather_outputs)",
                        "the parameter is (51, 64) in torch.float32, not (52, 64) in torch.float32"),
        "cloned": ("a, b = all_gather_outputs", "a, b = (each.clone() for each in all_gather_outputs)",
                   "has the right dtype already, and a copy of it needs the memory twice"),
        "swapped": ("a, b = all", "b, a = all", "in float32, half a of the loss is wrong in step 0. The first call"),
        "one_half_twice": ("b.to(param_dtype)", "a.to(param_dtype)", "half b of the loss is wrong in step 0"),
        "out_ignored": (TWO[TWO.index("    if a.dtype") :], "", "in bfloat16, half a of the loss is NaN in step 1"),
        "only_float32": (TWO, IN_FLOAT32, "the parameter is (52, 64) in torch.float32, not (52, 64) in torch.bfloat16"),
        "a_copy_into_out": (TWO[TWO.index("        refill") :],
                            "        out.copy_(TwoTensor(a[: len(out)], b[: len(out)]))",
                            "autograd has saved this parameter: fill it with refill"),
        "one_half_refilled": ("refill(out.b, b)", "pass", "in bfloat16, half b of the loss is NaN in step 1"),
        "gathered_named": ("(whole.a, whole.b)", "(a, b)", "in bfloat16, memory grows with every unit: 13,312, "),
        "nothing_named": ("(whole.a, whole.b)", "()", "in bfloat16, memory grows with every unit"),
        "error": (TWO, "raise KeyError('a')", "KeyError: 'a'"),
    },
    "both": {
        "right": (BOTH, BOTH, ""),
        "without_version_counter": ("refill(out, whole)", "out.data.copy_(whole[: len(out)])", ""),
        "a_list_and_a_note": ("encode(pad_rows(shard, rows)), None", "[*encode(pad_rows(shard, rows))], 'note'", ""),
        "gathered_named_too": ("(whole,)", "(whole, *gathered)", ""),
        "gathered_named": ("(whole,)", "gathered", "memory grows with every unit: 13,312, 29,632, "),
        "nothing_named": ("(whole,)", "()", "in float32, memory grows with every unit: 13,312, "),
        "not_refilled": ("refill(out, whole)", "pass", "the loss is NaN in step 1. What `out` holds is wrong"),
        "always_the_first": ("if out is None:\n            return", "return", "the loss is NaN in step 1"),
        "bare_copy": ("refill(out, whole)", "out.copy_(whole[: len(out)])", "modified by an inplace operation"),
        "padding_kept": ("refill(out, whole)", "out.copy_(whole)", "refill leaves the padding out"),
        "not_padded": ("pad_rows(shard, rows)", "shard", "rank 1 sends (25, 64) and (25, 1), and rank 0 (26, 64)"),
        "no_note": (", None", "", "fsdp_pre_all_gather gave Tensor, Tensor, not two things"),
        "one_hook": (", shard.fsdp_post_all_gather = pre_all_gather, post_all_gather", " = pre_all_gather",
                     "after add_hooks the shard has no fsdp_post_all_gather"),
        "encoded_once": (BOTH, "    kept = encode(pad_rows(shard, rows))\n" + BOTH.replace(
            "encode(pad_rows(shard, rows))", "kept"), "encode was called 0 times in 18 gathers"),
    },
}  # fmt: skip
# Gathers, which limits they are held against, and a part of what their learner is told; "" for a right one.
CODECS = {
    "int8": ("8 bits", ROWS, UNSCALE, ""),
    "float32": ("8 bits", "return (shard,)", BF16[1], "it sends 1.000 of the bytes of float32, expected at most 0.26"),
    "no_tuple": ("8 bits", "return shard.bfloat16()", BF16[1], "encode gave Tensor, not a tuple of tensors"),
    "not_cast_back": ("8 bits", BF16[0], "return gathered[0]", "decode gave (128, 128) in torch.bfloat16, not the"),
    "dtype_ignored": ("8 bits", ROWS, "return gathered[0].float() * gathered[1]",
                      "decode gave float32 when dtype was bfloat16: a policy may ask for it"),
    "half_of_the_rows": ("8 bits", "return (shard[: len(shard) // 2],)", BF16[1], "decode gave (64, 128) "),
    "only_zeros": ("8 bits", "return (torch.zeros_like(shard, dtype=torch.int8),)", BF16[1], "rows became 0"),
    "no_guard": ("8 bits", ROWS.replace(".clamp(min=1e-30)", ""), UNSCALE,
                 "encode makes an integer of NaN or infinity, whose value is not defined: is something divided by"),
    "a_scale_of_one_dimension": ("8 bits", ROWS.replace(", scales\n", ", scales.flatten()\n"), UNSCALE,
                                 "gathered[1] is (130,)"),
    "a_scale_without_dimensions": ("8 bits", FLOAT8.replace("scale.reshape(1)", "scale"), UNSCALE_SHARDS, ""),
    "one_scale_a_shard": ("8 bits", FLOAT8, UNSCALE,
                          "From 2 ranks, gathered[0] is (128, 128) and gathered[1] is (2,). Which rows of the param"),
    "a_scale_that_underflows": ("8 bits", ROWS.replace(", scales\n", ", scales.to(torch.float8_e4m3fn)\n"),
                                "return (gathered[0].float() * gathered[1].float()).to(dtype)",
                                "if that scale became 0"),
    "float8": ("8 bits", FLOAT8, UNSCALE_SHARDS, ""),
    "bf16_again": ("8 bits", *BF16, "it sends 0.500 of the bytes of float32, expected at most 0.26"),
    "int8_without_scale": ("8 bits", "return (shard.to(torch.int8),)", BF16[1],
                           "the weights with a row of zeros: rank 0's rows became 0"),
    "one_scale_for_all": ("8 bits", "return (shard * 400).round().clamp(-127, 127).to(torch.int8), torch.ones(1)",
                          "return (gathered[0].float() / 400).to(dtype)", "the tiny weights: rank 0's rows became 0"),
    "float8_alone": ("8 bits", "return (shard.to(torch.float8_e4m3fn),)", BF16[1], "Invalid scalar type"),
    "float8_without_scale": ("8 bits", "return (shard.to(torch.float8_e4m3fn).view(torch.uint8),)",
                             "return gathered[0].view(torch.float8_e4m3fn).to(dtype)",
                             "the tiny weights: rank 0's rows became 0"),
    "scale_of_one_rank": ("8 bits", FLOAT8, "return (gathered[0].float() * gathered[1][0]).to(dtype)",
                          "the weights whose first half is 3 times larger: rank 1's rows came back 3.0 times as large"),
    "scales_in_two_directions": ("8 bits", ROWS.replace(", scales\n", ", scales.expand_as(shard)\n"), UNSCALE,
                                 "it sends 1.250 of the bytes"),
    "row_of_zeros": ("8 bits", FLOAT8_ROWS, UNSCALE, "the weights with a row of zeros: rank 0's rows hold NaN"),
    "scale_forgotten": ("8 bits", ROWS, "return gathered[0].to(dtype)", "rank 0's rows came back 1,4"),
    "scale_not_sent": ("8 bits", ROWS.replace(", scales\n", ",\n"), UNSCALE, "IndexError"),
    "nibbles": ("4 bits", NIBBLES, UNPACK, ""),
    "nibbles_of_a_shard": ("4 bits", NIBBLES.replace("shard.abs().amax(dim=1, keepdim=True)",
                                                     "shard.abs().amax().expand(len(shard), 1)"), UNPACK,
                           "of their row's largest weight"),
    "nibbles_without_a_guard": ("4 bits", NIBBLES.replace(".clamp(min=1e-30)", ""), UNPACK,
                                "encode makes an integer of NaN or infinity"),
    "a_byte_each": ("4 bits", ROWS, UNSCALE, "it sends 0.258 of the bytes of float32, expected at most 0.14"),
}  # fmt: skip


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, with the signature of a check's exercise."""
    return lambda check, body: answer_to(HEADS[check], body, IMPORTS)


def judge(check, *answers):
    checks = extensions if hasattr(extensions, check) else extensions_at_work
    return repr(getattr(checks, check)(*answers))


HOOK_CASES = [(what, name) for what, answers in HOOKS.items() for name in answers]


def verdict_of(judged, reason):
    """Compare a verdict with a part of the reason, "" for a right answer."""
    assert judged.startswith("wrong: " if reason else "passed: ")
    assert reason in judged


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(("what", "name"), HOOK_CASES)
def test_a_hook_is_judged_by_what_it_does(what, name, answer):
    old, new, reason = HOOKS[what][name]
    check, solution = {"two_tensor": ("post_all_gather", TWO), "both": ("both_hooks", BOTH)}[what]
    verdict_of(judge(check, answer(check, changed(solution, old, new))), reason)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", CODECS)
def test_a_gather_is_judged_by_what_it_does(name, answer):
    limits, encode, decode, reason = CODECS[name]
    check = {"8 bits": "eight_bit_gather", "4 bits": "four_bit_gather"}[limits]
    verdict_of(judge(check, answer("encode", encode), answer("decode", decode)), reason)


def test_right_answers_pass_through_a_launch(answer):
    assert judge("post_all_gather", answer("post_all_gather", TWO)) == (
        "passed: trained on 2 and 3 ranks, in float32 and cast to bfloat16: right losses, and all memory freed"
    )
    codec = judge("eight_bit_gather", answer("encode", ROWS), answer("decode", UNSCALE))
    assert codec.startswith("passed: 0.258 of the bytes of float32, and no weight is off by more than 0.003")
    assert codec.endswith(" of the largest; half a step of int8 is 0.0039")


def test_what_is_wrong_on_the_ranks_becomes_the_verdict(answer):
    leaky = changed(BOTH, "(whole,)", "()")
    assert judge("both_hooks", answer("both_hooks", leaky)) == (
        "wrong: in float32, memory grows with every unit: 13,312, 29,632, 40,512 bytes are left after reshard, "
        "expected 0. Which memory did the hook make, and who was told to free it?"
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""'])
@pytest.mark.parametrize("check", ["post_all_gather", "both_hooks", "eight_bit_gather"])
def test_an_empty_answer_is_not_attempted(check, body, answer):
    if check in HEADS:
        assert judge(check, answer(check, body)) == "not attempted"
    else:
        assert judge(check, answer("encode", body), answer("decode", body)) == "not attempted"
        assert judge(check, answer("encode", BF16[0]), answer("decode", body)) == "not attempted"


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ("no such thing", "on rank 1, RuntimeError: no such thing"),
        (
            "one was modified by an inplace operation: [x]",
            "autograd has saved this parameter: fill it with refill (Run",
        ),
        ("written to twice. Please clone() the tensor", "autograd has saved this parameter: fill it with refill (Run"),
        ("self.dim() cannot be 0 to view Float as Byte", "what is sent needs a first dimension"),
        ("Invalid scalar type", "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its sc"),
    ],
)
def test_an_error_on_a_rank_is_shown_with_that_rank_or_a_hint(message, detail, answer, monkeypatch, tmp_path):
    def fail(*arguments, **parameters):
        raise labkit.RankFailed(1, "RuntimeError", message, "", tmp_path)

    monkeypatch.setattr(labkit, "run", fail)
    assert judge("both_hooks", answer("both_hooks", BOTH)).startswith(f"wrong: {detail}")


def test_ranks_that_wait_for_each_other_are_stopped(answer, monkeypatch):
    def wait(*arguments, **parameters):
        raise labkit.RunTimedOut(60, {}, {})

    monkeypatch.setattr(labkit, "run", wait)
    assert "does every rank send tensors of the same size?" in judge("both_hooks", answer("both_hooks", BOTH))


def test_the_profiler_sees_the_copies_inside_an_operator_that_multiplies_bfloat16():
    """As lab 3 says: on a CPU, bfloat16 times float32 makes two float32 copies that no operator returns."""

    def in_one_go(gathered, note, dtype, *, out=None):
        numbers, scales = gathered
        whole = torch.empty_like(numbers, dtype=dtype) if out is None else out
        whole.copy_(numbers[: len(whole)]).mul_(scales[: len(whole)])
        return (whole, (whole,)) if out is None else None

    assert own_bytes(in_one_go, torch.float32, (256, 64)) == 0
    assert own_bytes(in_one_go, torch.bfloat16, (256, 64)) == 2 * 4
