"""Lab 3."""

import torch

from answers import Exercise
from labkit.checks import extensions as checks

WRAP = "torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)"
NEW = """
two = {wrapper}
two.a, two.b = {halves}
return {result}
"""
DISPATCH = """
args_a, kwargs_a = tree_map_only(cls, lambda two: two.a, (args, kwargs or {}))
args_b, kwargs_b = tree_map_only(cls, lambda two: two.b, (args, kwargs or {}))
b = func(*args_b, **kwargs_b)
a = func(*args_a, **kwargs_a)
return tree_map(lambda x, y: cls(x, y) if isinstance(x, torch.Tensor) else x, a, b)
"""
SEND = """
rows = {rows}
return {answer}
"""
HOOK = """
a, b = all_gather_outputs
if out is None:
    return {first}
{later}
"""
CAST = """
a, b = all_gather_outputs
if out is None:
    whole = type(self)({halves})
    return whole, {free}
if a.dtype != param_dtype:
    {later}
"""
LEAK = """
numbers, scales = all_gather_outputs
exact = numbers.float() * scales
whole = exact.to(param_dtype)
if out is None:
    return whole, {free}
{later}
"""
ROWS = """
scales = shard.abs().amax(dim=1, keepdim=True){least} / {largest}
return {sent}
"""
NIBBLES = """
packed, scales = gathered
numbers = {numbers}
return ((numbers.float() - {zero}) * scales).to(dtype)
"""
THREE = "right on 2 ranks, but with 3 ranks: "
BESIDES = "all is right, but a step sends 6 {} bytes besides"


def new(wrapper=WRAP, halves="a.detach(), b.detach()", result="two"):
    return NEW.format(wrapper=wrapper, halves=halves, result=result)


def operated(old, new):
    assert DISPATCH.count(old) == 1, old
    return DISPATCH.replace(old, new)


def sent(rows="-(-outer_size[0] // mesh.size())", answer="(pad_rows(self.a, rows), pad_rows(self.b, rows)), None"):
    return SEND.format(rows=rows, answer=answer)


def hook(first="type(self)(a, b), (a, b)", later=""):
    return HOOK.format(first=first, later=later)


def cast(
    halves="a.to(param_dtype), b.to(param_dtype)",
    free="(whole.a, whole.b)",
    later="refill(out.a, a); refill(out.b, b)",
):
    return CAST.format(halves=halves, free=free, later=later)


def leak(free="(whole,)", later="refill(out, whole)"):
    return LEAK.format(free=free, later=later)


def rows(least=".clamp(min=1e-30)", largest="127", sent="(shard / scales).round().to(torch.int8), scales"):
    return ROWS.format(least=least, largest=largest, sent=sent)


def nibbles(numbers="torch.stack([packed // 16, packed % 16], dim=2).flatten(1)", zero="8"):
    return NIBBLES.format(numbers=numbers, zero=zero)


def encode_bf16(shard):
    return (shard.bfloat16(),)


def decode_plain(gathered, dtype):
    return gathered[0].to(dtype)


def encode_8bit(shard):
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (shard / scales).round().to(torch.int8), scales


def decode_8bit(gathered, dtype):
    return (gathered[0].float() * gathered[1]).to(dtype)


def encode_4bit(shard):
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
    numbers = ((shard / scales).round() + 8).byte()
    return numbers[:, ::2] * 16 + numbers[:, 1::2], scales


def decode_4bit(gathered, dtype):
    packed, scales = gathered
    pairs = (packed // 16, packed % 16)
    numbers = pairs[0].new_empty(len(packed), 2 * packed.shape[1])
    numbers[:, ::2], numbers[:, 1::2] = pairs
    return ((numbers.float() - 8) * scales).to(dtype)


EXERCISES = [
    Exercise(
        "3.1",
        "gather_bytes",
        checks.gather_bytes,
        {
            "gather_bytes(rows=8, columns=4, ranks=2, bytes_per_number=4) gave 128": (
                "return rows * columns * bytes_per_number"
            ),
            "gather_bytes(rows=5, columns=6, ranks=2, bytes_per_number=4) gave 48": (
                "return rows // ranks * columns * bytes_per_number"
            ),
            "gather_bytes(rows=8, columns=4, ranks=2, bytes_per_number=4) gave 80": (
                "return (rows // ranks + 1) * columns * bytes_per_number"
            ),
            "gather_bytes(rows=8, columns=4, ranks=4, bytes_per_number=2) gave 32": (
                "return -(-rows // ranks) * columns * 4"
            ),
        },
    ),
    Exercise(
        "3.2",
        "new_two",
        checks.new_two,
        {
            "of two tensors of shape (2, 3), new_two gave a tuple, not a tensor of class cls": "return a, b",
            "of two tensors of 64-bit numbers, new_two gave dtype torch.float32": new(
                wrapper="torch.Tensor._make_wrapper_subclass(cls, a.shape)"
            ),
            "of two tensors that are transposed, new_two gave strides (2, 1)": new(
                wrapper="torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)"
            ),
            "of two tensors of shape (2, 3), new_two gave a tensor whose .a is a copy": new(
                halves="a.detach().clone(), b.detach().clone()"
            ),
            "of two tensors of shape (2, 3), new_two gave a tensor whose .a is the other half": new(
                halves="b.detach(), a.detach()"
            ),
            "of two tensors that need a gradient, new_two gave a tensor whose .a asks autograd": new(halves="a, b"),
        },
    ),
    Exercise(
        "3.3",
        "dispatch",
        checks.dispatch,
        {
            "with dispatch, two * 2 raised RecursionError: dispatch calls itself without end": (
                "return func(*args, **(kwargs or {}))"
            ),
            "half b of two * 2 is what half a gives": operated("lambda two: two.b", "lambda two: two.a"),
            "half a of two * 2 is what half b gives": operated("cls(x, y)", "cls(y, x)"),
            "two * 2 gave a Tensor, not a cls": operated("cls(x, y) if", "x if"),
            "half a of torch.add(two, two, alpha=3) is wrong": operated("func(*args_a, **kwargs_a)", "func(*args_a)"),
            "with dispatch, two.chunk(3) raised AttributeError": operated(
                "tree_map(lambda x, y: cls(x, y) if isinstance(x, torch.Tensor) else x, a, b)", "cls(a, b)"
            ),
            "with dispatch, torch.equal(two, two) raised AttributeError": operated(
                " if isinstance(x, torch.Tensor) else x", ""
            ),
            "torch.add(two, 0, out=plain) leaves half b's result": operated(
                "b = func(*args_b, **kwargs_b)\na = func(*args_a, **kwargs_a)",
                "a = func(*args_a, **kwargs_a)\nb = func(*args_b, **kwargs_b)",
            ),
        },
    ),
    Exercise(
        "3.4",
        "pre_all_gather",
        checks.pre_all_gather,
        {
            "of 3 rows, where 2 ranks share 6, pre_all_gather gave Tensor, Tensor, not two": sent(
                answer="(pad_rows(self.a, rows), pad_rows(self.b, rows))"
            ),
            "of 3 rows, where 2 ranks share 6, pre_all_gather sends TwoTensor, not two": sent(answer="(self,), None"),
            "of 3 rows, where 2 ranks share 6, pre_all_gather sends a second tensor that holds the rows of": sent(
                answer="(pad_rows(self.a, rows), pad_rows(self.a, rows)), None"
            ),
            "of 2 rows, where 2 ranks share 5, pre_all_gather sends a first tensor of shape (2, 2)": sent(
                answer="(self.a, self.b), None"
            ),
            "of 3 rows, where 2 ranks share 6, pre_all_gather sends a first tensor of shape (6, 2)": sent(
                rows="outer_size[0]"
            ),
        },
    ),
    Exercise(
        "3.5",
        "post_all_gather",
        checks.post_all_gather,
        {
            "on the first call the hook gave TwoTensor, not two things": hook("labkit.tensors.TwoTensor(a, b)"),
            "on the first call the hook gave tuple, tuple, not two things": hook("(a, b), (a, b)"),
            "what was gathered has the right dtype already, and a copy of it": hook(
                "type(self)(a.clone(), b.clone()), ()"
            ),
            "in float32, half a of the loss is wrong in step 0": hook("type(self)(b, a), (a, b)"),
            "in float32, half b of the loss is wrong in step 0": hook("type(self)(a, a), (a, b)"),
            "the parameter is (51, 64) in torch.float32, not (52, 64)": hook("type(self)(a[:51], b[:51]), (a, b)"),
            f"{THREE}the parameter is (50, 64) in torch.float32, not (51, 64)": hook(
                "type(self)(*(each[: len(each) // 2 * 2] for each in (a, b))), (a, b)"
            ),
            "the parameter is (52, 64) in torch.float64, not (52, 64) in torch.float32": hook(
                "type(self)(a.double(), b.double()), ()"
            ),
            "in float32, all is right, but training sends 18 all_reduce calls with 243,072 bytes besides": (
                "torch.distributed.all_reduce(all_gather_outputs[0].clone())" + hook()
            ),
        },
    ),
    Exercise(
        "3.6",
        "encode_bf16",
        lambda encode: checks.bf16_gather(encode, decode_plain),
        {
            "it sends 1.000 of the bytes of float32": "return (shard,)",
            "encode_bf16 gave Tensor, not a tuple of tensors": "return shard.bfloat16()",
            "the weights with a row of zeros: rank 0's rows became 0": (
                "return (torch.zeros_like(shard, dtype=torch.bfloat16),)"
            ),
            "it sends 2.000 of the bytes of float32": "return (shard.double(),)",
            BESIDES.format("broadcast calls with 197,632"): (
                "torch.distributed.broadcast(shard.clone(), src=0)\nreturn (shard.bfloat16(),)"
            ),
        },
    ),
    Exercise(
        "3.6",
        "decode_bf16",
        lambda decode: checks.bf16_gather(encode_bf16, decode),
        {
            "on rank 0, ValueError: decode gave (128, 128) in torch.bfloat16": "return gathered[0]",
            "on rank 0, ValueError: decode gave (64, 128) in torch.float32": (
                "return gathered[0][: len(gathered[0]) // 2].to(dtype)"
            ),
            "the weights with a row of zeros: rank 0's rows came back 2.0 times as large": (
                "return 2 * gathered[0].to(dtype)"
            ),
            f"{THREE}on rank 0, RuntimeError: shape '[2, -1, 128]' is invalid": (
                "return gathered[0].view(2, -1, gathered[0].shape[1]).flatten(0, 1).to(dtype)"
            ),
            BESIDES.format("all_reduce calls with 197,632"): (
                "torch.distributed.all_reduce(gathered[0].clone())\nreturn gathered[0].to(dtype)"
            ),
        },
    ),
    Exercise(
        "3.7",
        "mended",
        checks.mended,
        {
            "in float32, memory grows with every unit: 13,312, 29,632": leak("(numbers, scales)"),
            "in bfloat16, memory grows with every unit: 6,656": leak("(exact,)"),
            "in float32, the loss is NaN in step 1": leak(later="pass"),
            "autograd has saved this parameter: fill it with refill": leak(later="out.copy_(whole[: len(out)])"),
            "the parameter is (52, 64) in torch.float64, not (52, 64) in torch.float32": leak().replace(
                "exact.to(param_dtype)", "exact.double()"
            ),
            f"{THREE}on rank 0, RuntimeError: shape '[2, -1, 64]' is invalid": leak().replace(
                "numbers.float() * scales",
                "(numbers.view(2, -1, numbers.shape[1]) * scales.view(2, -1, 1)).float().flatten(0, 1)",
            ),
            "in float32, all is right, but training sends": (
                "torch.distributed.all_reduce(all_gather_outputs[1].clone())" + leak()
            ),
        },
    ),
    Exercise(
        "3.8",
        "encode_8bit",
        lambda encode: checks.eight_bit_gather(encode, decode_8bit),
        {
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
        "3.8",
        "decode_8bit",
        lambda decode: checks.eight_bit_gather(encode_8bit, decode),
        {
            "the weights with a row of zeros: rank 0's rows came back 1,4": "return gathered[0].to(dtype)",
            "the weights with a row of zeros: rank 1's rows are off by": """
numbers, scales = gathered
half = len(scales) // 2
return (numbers.float() * torch.cat([scales[:half], scales[:half]])).to(dtype)
""",
            "on rank 0, IndexError": "return (gathered[0].float() * gathered[2]).to(dtype)",
            "on rank 0, ValueError: decode gave (128, 128) in torch.float64": (
                "return gathered[0].double() * gathered[1].double()"
            ),
            f"{THREE}on rank 0, RuntimeError: shape '[2, -1, 128]' is invalid": """
numbers, scales = gathered
by_rank = numbers.view(2, -1, numbers.shape[1]).float() * scales.view(2, -1, 1)
return by_rank.flatten(0, 1).to(dtype)
""",
        },
    ),
    Exercise(
        "3.9",
        "rms_error",
        checks.rms_error,
        {
            "of one row, rms_error gave 0.01243, the largest error": "return (exact - rounded).abs().max()",
            "of one row, rms_error gave 0.007556, the error itself": "return (exact - rounded).square().mean().sqrt()",
            "of one row, rms_error gave 4.567e-06, the square of it": (
                "return (exact - rounded).square().mean() / exact.square().mean()"
            ),
        },
    ),
    Exercise(
        "3.10",
        "held_bytes",
        checks.held_bytes,
        {
            "held_bytes(numbers=100, sent_bytes=4, compute_bytes=4) gave 800": (
                "return numbers * (sent_bytes + compute_bytes)"
            ),
            "held_bytes(numbers=100, sent_bytes=2, compute_bytes=4) gave 400": "return numbers * compute_bytes",
            "held_bytes(numbers=100, sent_bytes=2, compute_bytes=4) gave 200": "return numbers * sent_bytes",
        },
    ),
    Exercise(
        "3.11",
        "pays_below",
        checks.pays_below,
        {
            "pays_below(bytes_saved=1000, coding_s=1.0, ranks=2) gave 1,000.0": "return bytes_saved / coding_s",
            "pays_below(bytes_saved=1000, coding_s=0.5, ranks=2) gave 250.0": (
                "return bytes_saved * (ranks - 1) / ranks * coding_s"
            ),
            "pays_below(bytes_saved=1000, coding_s=1.0, ranks=8) gave 125.0": "return bytes_saved / ranks / coding_s",
        },
    ),
    Exercise(
        "3.12",
        "cast_all_gather",
        checks.cast_all_gather,
        {
            "the parameter is (52, 64) in torch.float32, not (52, 64) in torch.bfloat16": cast("a, b"),
            "in bfloat16, memory grows with every unit: 13,312, ": cast(free="(a, b)"),
            "in bfloat16, half a of the loss is NaN in step 1": cast(later="pass"),
            "in bfloat16, half b of the loss is NaN in step 1": cast(later="refill(out.a, a)"),
            "autograd has saved this parameter: fill it with refill": cast(
                later="out.copy_(type(self)(a[: len(out)], b[: len(out)]))"
            ),
            f"{THREE}the parameter is (50, 64) in torch.float32, not (51, 64)": cast(
                "*(each[: len(each) // 2 * 2].to(param_dtype) for each in (a, b))"
            ),
            "in float32, all is right, but training sends": (
                "torch.distributed.all_reduce(all_gather_outputs[0].clone())" + cast()
            ),
        },
    ),
    Exercise(
        "3.13",
        "encode_4bit",
        lambda encode: checks.four_bit_gather(encode, decode_4bit),
        {
            "on rank 0, ValueError: decode gave (128, 256)": rows(
                largest="7", sent="((shard / scales).round() + 8).to(torch.uint8), scales"
            ),
            "the weights with a row of zeros: rank 0's rows are off by": """
scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
numbers = ((shard / scales).round() + 8).to(torch.uint8)
return numbers[:, 1::2] * 16 + numbers[:, ::2], scales
""",
            "the weights with a row of zeros: rank 0's rows hold NaN": """
scales = shard.abs().amax(dim=1, keepdim=True) / 0.0
numbers = (shard + 8).to(torch.uint8)
return numbers[:, ::2] * 16 + numbers[:, 1::2], scales
""",
            "it sends 0.141 of the bytes of float32": rows(
                largest="7",
                sent="((shard / scales).round() + 8).byte().view(len(shard), -1, 2)"
                " @ torch.tensor([16, 1], dtype=torch.uint8), scales.double()",
            ),
            BESIDES.format("broadcast calls with 49,408"): """
scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
numbers = ((shard / scales).round() + 8).to(torch.uint8)
torch.distributed.broadcast(numbers.clone(), src=0)
return numbers[:, ::2] * 16 + numbers[:, 1::2], scales
""",
        },
    ),
    Exercise(
        "3.13",
        "decode_4bit",
        lambda decode: checks.four_bit_gather(encode_4bit, decode),
        {
            "the weights with a row of zeros: rank 0's rows are off by 1.2": nibbles(zero="0"),
            "the weights with a row of zeros: rank 0's rows are off by 2 of": nibbles(
                numbers="torch.stack([packed // 16, packed % 16], dim=1).flatten(1)"
            ),
            "on rank 0, ValueError: decode gave (128, 64)": nibbles(numbers="packed"),
            "on rank 0, ValueError: decode gave (128, 128) in torch.float64": nibbles().replace(
                ".to(dtype)", ".double()"
            ),
            f"{THREE}on rank 0, RuntimeError: shape '[2, -1, 1]' is invalid": nibbles().replace(
                "* scales", "* scales.view(2, -1, 1).flatten(0, 1)"
            ),
        },
    ),
]
