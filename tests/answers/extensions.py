"""Lab 3."""

import torch

from answers import Exercise, changed
from labkit_course.checks import extensions as checks

ROWS = """
scales = shard.abs().amax(dim=1, keepdim=True){least} / {largest}
return {sent}
"""
THREE = "right on 2 ranks, but with 3 ranks: "
BESIDES = "all is right, but a step sends 6 {} bytes besides"


def hooks(*lines, before=""):
    return f"{before}\n{changed('03', 'add_hooks', *lines)}"


def lean(*lines):
    return changed("03", "lean_post_all_gather", *lines)


def rows(least=".clamp(min=1e-30)", largest="127", sent="(shard / scales).round().to(torch.int8), scales"):
    return ROWS.format(least=least, largest=largest, sent=sent)


def encode_8bit(shard):
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (shard / scales).round().to(torch.int8), scales


def decode_8bit(gathered, dtype):
    return (gathered[0].float() * gathered[1]).to(dtype)


EXERCISES = [
    Exercise(
        "3.1",
        "encode_8bit",
        lambda encode: checks.eight_bit_gather(encode, decode_8bit),
        {
            "encode_8bit makes an integer of NaN or infinity": rows(least=""),
            "the weights with a row of zeros: rank 0's rows became 0": rows(
                sent="shard.to(torch.int8), torch.ones_like(scales)"
            ),
            "the weights with a row of zeros: rank 0's rows hold NaN": rows(
                least="", sent="(shard / scales).to(torch.float8_e4m3fn), scales"
            ),
            "the tiny weights: rank 0's rows became 0": """
scale = torch.tensor(0.3 / 127).expand(len(shard), 1).contiguous()
return (shard / scale).round().to(torch.int8), scale
""",
            "it sends 1.250 of the bytes of float32": rows(
                sent="(shard / scales).round().to(torch.int8), scales.expand_as(shard).contiguous()"
            ),
            "the weights with a row of zeros: rank 0's rows are off by": rows(largest="7"),
            "it sends 0.266 of the bytes of float32": rows(
                sent="(shard / scales).round().to(torch.int8), scales.double()"
            ),
            BESIDES.format("all_reduce calls with 24"): (
                "torch.distributed.all_reduce(shard.abs().amax(), op=torch.distributed.ReduceOp.MAX)" + rows()
            ),
        },
    ),
    Exercise(
        "3.1",
        "decode_8bit",
        lambda decode: checks.eight_bit_gather(encode_8bit, decode),
        {
            "the weights with a row of zeros: rank 0's rows came back 1,4": "return gathered[0].to(dtype)",
            "the weights with a row of zeros: rank 1's rows are off by": """
numbers, scales = gathered
half = len(scales) // 2
return (numbers.float() * torch.cat([scales[:half], scales[:half]])).to(dtype)
""",
            "decode_8bit raised IndexError: tuple index out of range. From 2 ranks, gathered[0] is (128, 128)": (
                "return (gathered[0].float() * gathered[2]).to(dtype)"
            ),
            "decode_8bit gave float32 when dtype was bfloat16": "return gathered[0].float() * gathered[1]",
            "on rank 0, ValueError: decode gave (128, 128) in torch.float64": (
                "return gathered[0].double() * gathered[1].double()"
            ),
            f"{THREE}decode_8bit raised RuntimeError: shape '[2, -1, 128]' is invalid": """
numbers, scales = gathered
by_rank = numbers.view(2, -1, numbers.shape[1]).float() * scales.view(2, -1, 1)
return by_rank.flatten(0, 1).to(dtype)
""",
        },
    ),
    Exercise(
        "3.2",
        "add_hooks",
        checks.both_hooks,
        {
            "in float32, memory grows with every unit: 13,312, 29,632": hooks(("whole, (whole,)", "whole, gathered")),
            "in bfloat16, memory grows with every unit: 6,656, 14,816": hooks(
                ("decode(gathered, dtype)", "(exact := decode(gathered, torch.float32)).to(dtype)"),
                ("whole, (whole,)", "whole, (exact,)"),
            ),
            "in float32, the loss is NaN in step 1": hooks(("refill(out, whole)", "pass")),
            "autograd has saved this parameter: fill it with refill": hooks(
                ("refill(out, whole)", "out.copy_(whole[: len(out)])")
            ),
            "does `out` have as many rows as what is copied into it": hooks(("refill(out, whole)", "out.copy_(whole)")),
            "rank 1 sends (25, 64) and (25, 1), and rank 0 (26, 64) and (26, 1)": hooks(
                ("pad_rows(shard, rows)", "shard")
            ),
            f"{THREE}rank 1 sends (27, 51) and (27, 1)": hooks(
                (
                    "pad_rows(shard, rows)",
                    "pad_rows(shard, rows) if mesh.size() == 2 else shard[: 26 + mesh.get_rank()]",
                )
            ),
            "the parameter is (52, 64) in torch.float32, not (52, 64) in torch.bfloat16": hooks(
                ("decode(gathered, dtype)", "decode(gathered, torch.float32)")
            ),
            "fsdp_pre_all_gather gave Tensor, Tensor, not two things": hooks(
                ("encode(pad_rows(shard, rows)), None", "encode(pad_rows(shard, rows))")
            ),
            "after add_hooks the shard has no fsdp_post_all_gather": hooks(
                (
                    "shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather",
                    "shard.fsdp_pre_all_gather = pre_all_gather",
                )
            ),
            "in float32, encode was called 0 times in 18 gathers": hooks(
                ("return encode(pad_rows(shard, rows)), None", "return kept, None"),
                before="kept = encode(pad_rows(shard, rows))",
            ),
            "in float32, all is right, but training sends": hooks(
                ("encode(pad_rows", "torch.distributed.all_reduce(torch.ones(1)) or encode(pad_rows")
            ),
        },
    ),
    Exercise(
        "3.3",
        "lean_post_all_gather",
        checks.lean_decode,
        {
            # A CPU multiplies bfloat16 by float32 through two float32 copies, inside one operator.
            "in bfloat16, all is right, but the hook holds 8.0 bytes a number of its own": """
numbers, scales = gathered
whole = torch.empty_like(numbers, dtype=dtype) if out is None else out
with quietly(whole):
    whole.copy_(numbers[: len(whole)]).mul_(scales[: len(whole)])
return (whole, (whole,)) if out is None else None
""",
            "in float32, all is right, but the hook holds 8.0 bytes a number of its own": lean(
                ("range(0, len(whole), 8)", "[0]"), ("min(start + 8, len(whole))", "len(whole)")
            ),
            "in float32, all is right, but the hook holds 4.1 bytes a number of its own": lean(
                ("for start", "floats = numbers.float()\n    for start"),
                ("numbers[rows].float()", "floats[rows]"),
            ),
            "autograd has saved this parameter": lean(("quietly(whole)", "torch.no_grad()")),
            "does `out` have as many rows as what is copied into it": lean(
                ("min(start + 8, len(whole))", "start + 8"),
                ("whole[rows] = ", "whole[rows] = 0 * whole[rows] + "),
            ),
            "in float32, the loss is wrong in step 0": lean((" * scales[rows]", "")),
            "in float32, memory grows with every unit: 13,312, 29,632": lean(("(whole, (whole,))", "(whole, ())")),
        },
    ),
]
