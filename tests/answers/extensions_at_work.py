"""Lab 3b."""

from answers import Exercise
from labkit_course.checks import extensions_at_work as checks

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
CAST = """
a, b = all_gather_outputs
if out is None:
    whole = type(self)({halves})
    return whole, {free}
if a.dtype != param_dtype:
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


def cast(
    halves="a.to(param_dtype), b.to(param_dtype)",
    free="(whole.a, whole.b)",
    later="refill(out.a, a); refill(out.b, b)",
):
    return CAST.format(halves=halves, free=free, later=later)


def rows(least=".clamp(min=1e-30)", largest="127", sent="(shard / scales).round().to(torch.int8), scales"):
    return ROWS.format(least=least, largest=largest, sent=sent)


def nibbles(numbers="torch.stack([packed // 16, packed % 16], dim=2).flatten(1)", zero="8"):
    return NIBBLES.format(numbers=numbers, zero=zero)


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
        "3b.1",
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
        "3b.2",
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
        "3b.3",
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
        "3b.4",
        "post_all_gather",
        checks.post_all_gather,
        {
            "on the first call the hook gave TwoTensor, not two things": ("return type(self)(*all_gather_outputs)"),
            "what was gathered has the right dtype already, and a copy of it": cast("a.clone(), b.clone()"),
            "in float32, half a of the loss is wrong in step 0": cast("b.to(param_dtype), a.to(param_dtype)"),
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
        "3b.5",
        "halves",
        checks.halves,
        {
            "on 3 ranks a hook that sends a twice does not fail": "a = torch.randn(5, 4)\nreturn a, a.clone(), 3",
            "on 2 ranks a hook that leaves out the padding does not fail": (
                "return torch.randn(6, 4), torch.randn(6, 4), 2"
            ),
            "on 3 ranks a hook that sends zeros for b does not fail": "return torch.ones(5, 4), torch.zeros(5, 4), 3",
            "on 3 ranks a hook that rounds b to bfloat16 does not fail": (
                "return torch.randn(5, 4), torch.arange(20.0).view(5, 4), 3"
            ),
            "on 3 ranks the test fails with the right hook, too": (
                "return torch.randn(5, 4) / 0 * 0, torch.randn(5, 4), 3"
            ),
            "halves() gave [5, 4] and [4, 5]": "return torch.randn(5, 4), torch.randn(4, 5), 3",
            "halves() gave 1 ranks": "return torch.randn(5, 4), torch.randn(5, 4), 1",
        },
    ),
    Exercise(
        "3b.6",
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
        "3b.6",
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
            f"{THREE}decode_4bit raised RuntimeError: shape '[2, -1, 1]' is invalid": nibbles().replace(
                "* scales", "* scales.view(2, -1, 1).flatten(0, 1)"
            ),
        },
    ),
]
