"""labkit.checks.extensions: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import pytest

import labkit
from labkit.checks import extensions as checks

IMPORTS = "import torch\nfrom labkit.tensors import TwoTensor, refill\n\n\n"
HOOK = "def hook(all_gather_outputs, metadata, param_dtype, *, out=None):"
HEADS = {
    "gather_bytes": "def bytes_of(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:",
    "post_all_gather": HOOK.replace("(", "(self, ", 1),
    "cast_all_gather": HOOK.replace("(", "(self, ", 1),
    "mended": HOOK,
    "encode": "def encode(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:",
    "decode": "def decode(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:",
}
UNEVEN = "return -(-rows // ranks) * columns * bytes_per_number"
TWO = """
    a, b = all_gather_outputs
    if out is None:
        whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    if a.dtype != param_dtype:
        refill(out.a, a)
        refill(out.b, b)
"""
INT8 = """
    numbers, scales = all_gather_outputs
    whole = (numbers.float() * scales).to(param_dtype)
    if out is None:
        return whole, (whole,)
    refill(out, whole)
"""
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
    "int8": {
        "right": (INT8, INT8, ""),
        "without_version_counter": ("refill(out, whole)", "out.data.copy_(whole[: len(out)])", ""),
        "gathered_named": ("(whole,)", "(numbers, scales)", "memory grows with every unit: 13,312, 29,632, "),
        "named_before_the_cast": (
            "whole = (numbers.float() * scales).to(param_dtype)\n    if out is None:\n        return whole, (whole,)",
            "exact = numbers.float() * scales\n    whole = exact.to(param_dtype)\n    if out is None:\n"
            "        return whole, (exact,)",
            "in bfloat16, memory grows with every unit: 6,656, ",
        ),
        "nothing_named": ("(whole,)", "()", "in float32, memory grows with every unit: 13,312, "),
        "scales_forgotten": (" * scales", "", "in float32, the loss is wrong in step 0. The first call"),
        "not_refilled": ("refill(out, whole)", "pass", "the loss is NaN in step 1. What `out` holds is wrong"),
        "always_the_first": ("    if out is None:\n        return", "    return", "the loss is NaN in step 1"),
        "bare_copy": ("refill(out, whole)", "out.copy_(whole[: len(out)])", "modified by an inplace operation"),
        "padding_kept": ("refill(out, whole)", "out.data.copy_(whole)", "must match the size"),
    },
}  # fmt: skip
# Gathers, which limits they are held against, and a part of what their learner is told; "" for a right one.
CODECS = {
    "bf16": ("bf16", *BF16, ""),
    "fp16_is_as_good": ("bf16", "return (shard.half(),)", BF16[1], ""),
    "float32": ("bf16", "return (shard,)", BF16[1], "it sends 1.000 of the bytes of float32, expected at most 0.5"),
    "no_tuple": ("bf16", "return shard.bfloat16()", BF16[1], "encode gave Tensor, not a tuple of tensors"),
    "not_cast_back": ("bf16", BF16[0], "return gathered[0]", "decode gave (128, 128) in torch.bfloat16, not the"),
    "half_of_the_rows": ("bf16", "return (shard[: len(shard) // 2],)", BF16[1], "decode gave (64, 128) "),
    "only_zeros": ("bf16", "return (torch.zeros_like(shard, dtype=torch.bfloat16),)", BF16[1], "rows became 0"),
    "float8_is_too_rough": ("bf16", FLOAT8, UNSCALE_SHARDS, "rank 0's rows are off by 0.0"),
    "int8": ("8 bits", ROWS, UNSCALE, ""),
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
    "a_byte_each": ("4 bits", ROWS, UNSCALE, "it sends 0.258 of the bytes of float32, expected at most 0.14"),
}  # fmt: skip


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, with the signature of a check's exercise."""
    return lambda check, body: answer_to(HEADS[check], body, IMPORTS)


def judge(check, *answers):
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
    check, solution = {"two_tensor": ("cast_all_gather", TWO), "int8": ("mended", INT8)}[what]
    verdict_of(judge(check, answer(check, changed(solution, old, new))), reason)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", CODECS)
def test_a_gather_is_judged_by_what_it_does(name, answer):
    limits, encode, decode, reason = CODECS[name]
    check = {"bf16": "bf16_gather", "8 bits": "eight_bit_gather", "4 bits": "four_bit_gather"}[limits]
    verdict_of(judge(check, answer("encode", encode), answer("decode", decode)), reason)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(
    ("body", "verdict"), [(IN_FLOAT32, "passed"), (TWO, "passed"), (IN_FLOAT32 + "    refill(out.a, b)", "wrong")]
)
def test_in_its_own_dtype_nothing_is_left_to_do_on_later_calls(body, verdict, answer):
    assert judge("post_all_gather", answer("post_all_gather", body)).startswith(verdict)


def test_right_answers_pass_through_a_launch(answer):
    assert judge("cast_all_gather", answer("cast_all_gather", TWO)) == (
        "passed: trained on 2 and 3 ranks, in float32 and cast to bfloat16: right losses, and all memory freed"
    )
    codec = judge("eight_bit_gather", answer("encode", ROWS), answer("decode", UNSCALE))
    assert codec.startswith("passed: 0.258 of the bytes of float32, and no weight is off by more than 0.003")


def test_what_is_wrong_on_the_ranks_becomes_the_verdict(answer):
    leaky = changed(INT8, "(whole,)", "()")
    assert judge("mended", answer("mended", leaky)) == (
        "wrong: in float32, memory grows with every unit: 13,312, 29,632, 40,512 bytes are left after reshard, "
        "expected 0. Which memory did the hook make, and who was told to free it?"
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""'])
@pytest.mark.parametrize("check", ["gather_bytes", "post_all_gather", "mended", "bf16_gather", "eight_bit_gather"])
def test_an_empty_answer_is_not_attempted(check, body, answer):
    if check in HEADS:
        assert judge(check, answer(check, body)) == "not attempted"
    else:
        assert judge(check, answer("encode", body), answer("decode", body)) == "not attempted"
        assert judge(check, answer("encode", BF16[0]), answer("decode", body)) == "not attempted"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (UNEVEN, "passed: 5 cases agree"),
        ("return rows * columns * bytes_per_number", "gave 128, expected 64. A rank sends its own rows"),
        ("return rows // ranks * columns * bytes_per_number", "gave 48, expected 72. Every rank sends as many rows"),
        ("return (rows // ranks + 1) * columns * bytes_per_number", "gave 80, expected 64. A rank sends its own"),
        ("return -(-rows // ranks) * columns * 4", "bytes_per_number=2) gave 32, expected 16."),
        ("return rows * columns * bytes_per_number / ranks", "gave 60.0, expected 72."),
        ("rows // ranks", "gave None, not a number"),
    ],
)
def test_bytes_of_an_uneven_shard(body, reason, answer):
    assert reason in judge("gather_bytes", answer("gather_bytes", body))


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
    assert judge("mended", answer("mended", INT8)).startswith(f"wrong: {detail}")


def test_ranks_that_wait_for_each_other_are_stopped(answer, monkeypatch):
    def wait(*arguments, **parameters):
        raise labkit.RunTimedOut(60, {}, {})

    monkeypatch.setattr(labkit, "run", wait)
    assert "does every rank send tensors of the same size?" in judge("mended", answer("mended", INT8))
