"""labkit.tensors: TwoTensor as a tensor, hooks by themselves, and what goes wrong with wrong ones."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit import tensors
from labkit.parallel.extensions import apply_extension
from labkit.session.traffic import CommunicationCounter
from labkit.tensors import Extension, TwoTensor, gather_ms
from labkit.tensors.quantisation import EXTENSIONS
from labkit.theory import extensions as theory

POLICY = MixedPrecisionPolicy()
TWO_RANKS = SimpleNamespace(size=lambda: 2)


@pytest.fixture
def two():
    return TwoTensor(torch.arange(12.0).view(4, 3), -torch.arange(12.0).view(4, 3))


@pytest.fixture
def first_of_two():
    """A mesh of two ranks, of which the second does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_an_operation_is_done_with_both_halves(two):
    a, b = two.a.clone(), two.b.clone()
    result = torch.relu(two) @ torch.ones(3) + 1
    assert torch.equal(result.a, torch.relu(a) @ torch.ones(3) + 1)
    assert torch.equal(result.b, torch.relu(b) @ torch.ones(3) + 1)
    parts = two.chunk(2)
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2, 3)]
    assert torch.equal(parts[1].b, b[2:])


def test_in_place_and_out_return_the_tensor_that_was_given(two):
    a = two.a.clone()
    assert two.add_(1) is two
    assert torch.equal(two.a, a + 1)
    out = TwoTensor(torch.zeros(4, 3), torch.zeros(4, 3))
    assert torch.mul(two, 2, out=out) is out
    assert torch.equal(out.b, two.b * 2)
    torch._foreach_mul_([two, out], 0)
    assert not two.a.any() and not out.b.any()


def test_both_halves_have_memory_of_their_own():
    weight = torch.ones(4, 3)
    two = tensors.make_two_tensor(weight)
    two.add_(1)
    assert torch.equal(two.a, torch.full((4, 3), 2.0)) and torch.equal(two.b, two.a)
    assert torch.equal(weight, two.a), "the first is the weight itself"


def test_a_view_stays_a_view(two):
    view = two[1:3]
    view.zero_()
    assert not two.a[1:3].any() and not two.b[1:3].any()
    assert two.a[3].all(), "and nothing else changed"
    assert view.storage_offset() == 3
    assert view.untyped_storage()._cdata == two.untyped_storage()._cdata
    assert two.clone().untyped_storage()._cdata != two.untyped_storage()._cdata


def test_autograd_follows_the_wrapper(two):
    parameter = nn.Parameter(two)
    assert isinstance(parameter, TwoTensor) and isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert not parameter.detach().requires_grad
    assert parameter.detach().a.data_ptr() == two.a.data_ptr()
    parameter.square().sum().backward()
    assert torch.equal(parameter.grad.a, 2 * two.a) and torch.equal(parameter.grad.b, 2 * two.b)


def test_it_can_be_taken_apart_and_built_again(two):
    names, metadata = two.__tensor_flatten__()
    inner = {name: getattr(two, name) for name in names}
    again = TwoTensor.__tensor_unflatten__(inner, metadata, two.size(), two.stride())
    assert torch.equal(again.a, two.a) and torch.equal(again.b, two.b)
    assert [plain.data_ptr() for plain in tensors.plain_tensors(again)] == [two.a.data_ptr(), two.b.data_ptr()]


def test_a_plain_out_keeps_the_first_half_and_a_plain_sum_is_refused(two):
    assert torch.equal(torch.add(two, 0, out=torch.empty(4, 3)), two.a)
    with pytest.raises(TypeError, match="a plain tensor by both halves"):
        torch.zeros(4, 3).add_(two)


@pytest.mark.parametrize(
    ("other", "what"),
    [(torch.zeros(3, 4), "shape"), (torch.zeros(3, 4).t(), "strides"), (torch.zeros(4, 3).half(), "dtype")],
)
def test_halves_that_differ_are_refused(two, other, what):
    with pytest.raises(ValueError, match=f"halves of a TwoTensor differ in {what}"):
        TwoTensor(two.a, other)


def test_both_halves_are_sent_and_a_shorter_shard_is_padded(two):
    sent, _ = two.fsdp_pre_all_gather(TWO_RANKS, torch.Size([8, 3]), (3, 1), nn.Identity(), POLICY)
    assert [each.data_ptr() for each in sent] == [two.a.data_ptr(), two.b.data_ptr()], "nothing is copied"
    sent, _ = two.fsdp_pre_all_gather(TWO_RANKS, torch.Size([9, 3]), (3, 1), nn.Identity(), POLICY)
    assert [tuple(each.shape) for each in sent] == [(5, 3), (5, 3)]
    assert torch.equal(sent[1][:4], two.b) and not sent[1][4].any()


def test_the_gathered_memory_is_the_parameter_and_is_only_copied_into_another_dtype(two):
    gathered = [torch.ones(8, 3), torch.full((8, 3), 2.0)]
    whole, to_free = two.fsdp_post_all_gather(gathered, None, torch.float32)
    assert whole.a.data_ptr() == gathered[0].data_ptr()
    assert {each.data_ptr() for each in to_free} == {each.data_ptr() for each in gathered}
    assert two.fsdp_post_all_gather(gathered, None, torch.float32, out=whole) is None

    short, to_free = two.fsdp_post_all_gather(gathered, None, torch.bfloat16)
    assert {each.data_ptr() for each in to_free} == {short.a.data_ptr(), short.b.data_ptr()}, "what casting allocated"
    versions = [each._version for each in (short, short.a, short.b)]
    two.fsdp_post_all_gather([each + 1 for each in gathered], None, torch.bfloat16, out=short)
    assert short.dtype == torch.bfloat16 and (short.a == 2).all() and (short.b == 3).all()
    assert [each._version for each in (short, short.a, short.b)] == versions, "autograd may have saved them"


@pytest.mark.parametrize(
    ("gathered", "message"),
    [
        ([torch.ones(8, 3)], "gathered as 2 tensors, got 1"),
        ([torch.ones(8, 3), torch.ones(6, 3)], r"differ in shape, \(8, 3\) and \(6, 3\)"),
    ],
)
def test_a_forgotten_half_or_one_of_the_wrong_size_is_refused(two, gathered, message):
    with pytest.raises(ValueError, match=message):
        two.fsdp_post_all_gather(gathered, None, torch.float32)


@pytest.mark.parametrize("half", ["a", "b"])
def test_memory_that_is_not_the_gathered_is_refused(two, half):
    gathered = {"a": two.a, "b": two.b} | {half: torch.ones(4, 3)}
    with pytest.raises(ValueError, match=f"half {half} does not lie in the gathered tensor's memory"):
        two.fsdp_post_all_gather([*gathered.values()], None, torch.float32, out=two)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_arrives_is_as_exact_as_theory_says_and_as_large(name):
    torch.manual_seed(0)
    shards = [torch.randn(5, 3, 7), torch.zeros(5, 3, 7)]
    sent = [EXTENSIONS[name].encode(shard) for shard in shards]
    assert sum(t.numel() * t.element_size() for t in sent[0]) == theory.gather_bytes((9, 3, 7), 2, name)
    gathered = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    whole = EXTENSIONS[name].decode(gathered, torch.float32)
    error = (whole[:5] - shards[0]).abs().max() / shards[0].abs().max()
    assert error <= theory.rounding_error(name) + 1e-7
    assert not whole[5:].any(), "a shard of zeros has no scale to divide by"


@pytest.mark.parametrize("name", ["float8", "int8"])
def test_scales_do_not_hide_nan(name):
    sent = EXTENSIONS[name].encode(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]))
    assert EXTENSIONS[name].decode(sent, torch.float32)[0].isnan().any()


def test_what_cannot_be_extended_is_refused(first_of_two):
    model = nn.Linear(6, 5)
    with pytest.raises(ValueError, match="not sharded along dim 0: call fully_shard first"):
        tensors.extend_parameter(model.weight, "bf16")
    fully_shard(model, mesh=first_of_two)
    with pytest.raises(ValueError, match="extension 'int4' is none of fp32, bf16, float8, int8"):
        tensors.extend_parameter(model.weight, "int4")
    with pytest.raises(ValueError, match="a vector of shape"):
        tensors.extend_parameter(model.bias, "bf16")
    meta = fully_shard(nn.Linear(6, 5, device="meta"), mesh=first_of_two)
    with pytest.raises(ValueError, match="on the meta device: call to_empty first"):
        tensors.extend_parameter(meta.weight, "bf16")


def wrong_encode(sends):
    return Extension(("numbers", "scales"), lambda shard: sends(shard), lambda gathered, dtype: gathered[0].to(dtype))


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (wrong_encode(lambda shard: (shard,)), "encode gave 1 tensors to send, not 2: numbers, scales"),
        (wrong_encode(lambda shard: (shard[:-1], shard)), r"decode gave \(4, 6\) .* not .*\(6, 6\)"),
        (
            Extension(("x",), lambda x: (x,), lambda gathered, dtype: torch.zeros(12, 6, dtype=dtype)[:6]),
            "a view of a larger tensor, which cannot be freed: clone it",
        ),
    ],
)
def test_a_wrong_extension_fails_clearly(first_of_two, extension, message):
    model = fully_shard(nn.Linear(6, 5, bias=False), mesh=first_of_two)
    tensors.extend_model(model, extension)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 6))


class Leaky(TwoTensor):
    """Casts, and names what it cast from instead of what it made."""

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        given = super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)
        return given if given is None else (given[0], tuple(all_gather_outputs))


@pytest.mark.parametrize("kind", [TwoTensor, Leaky])
def test_a_leak_is_measured_to_the_byte(first_of_two, kind):
    model = nn.Sequential(nn.Linear(6, 5, bias=False))
    model[0].weight = nn.Parameter(kind(model[0].weight, model[0].weight.detach().clone()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mesh=first_of_two, mp_policy=policy)
    fully_shard(model, mesh=first_of_two, mp_policy=policy)
    leaked = {"0.weight": 2 * 6 * 6 * 2} if kind is Leaky else {}  # 2 halves, 6 x 6 with padding, 2 bytes
    assert tensors.leak_bytes(model) == leaked
    if leaked:
        with pytest.raises(ValueError, match=r"0.weight: 144 bytes .* must also return the tensors that it allocated"):
            tensors.refuse_leak(model)
    else:
        tensors.refuse_leak(model)


def gather_uneven(name):
    """Two training steps with a [5, 6] weight: errors of the full weight in them, and what is seen afterwards."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(6, 5))
    weight, bias = (each.detach().clone() for each in model[0].parameters())
    apply_extension(model, mesh, name)
    seen = []
    for _ in range(2):
        # the output's rows are the weight's columns; the input's gradient needs the weight saved
        output = model(torch.eye(6, requires_grad=True))
        for plain in tensors.plain_tensors(output.detach() - bias):
            seen.append(float((plain.t() - weight).abs().max() / weight.abs().max()))
        output.square().mean().backward()
    shard = tensors.plain_shards(model[0].weight)[0]
    return seen, tensors.leak_bytes(model), tensors.gather_errors(model), tuple(shard.shape)


@pytest.mark.parametrize("name", theory.EXTENSION_BYTES)
def test_rows_that_do_not_divide_are_padded_and_come_back_whole(ranks, name):
    for seen, unfreed, error, shape in ranks(2)(gather_uneven, name):
        assert len(seen) == (4 if name == "two_tensor" else 2)
        assert max(seen) <= theory.rounding_error(name) + 1e-6
        assert error.largest <= theory.rounding_error(name) + 1e-6
        assert (error.largest > 0) == (name not in ("fp32", "two_tensor")), "or nothing was rounded"
        assert error.rms == pytest.approx({"bf16": 0.0017, "float8": 0.027, "int8": 0.004}.get(name, 0.0), rel=0.4)
        assert unfreed == {}
        assert shape in ((3, 6), (2, 6))


def gather_twice(name):
    """The largest difference between a weight and what computes, before and after the weight has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    apply_extension(model, init_device_mesh("cpu", (2,)), name)
    off = []
    for _ in range(2):
        for plain in tensors.plain_tensors(model(torch.eye(6)).detach()):
            exact = tensors.plain_tensors(model[0].weight.full_tensor())[0]
            off.append(float((plain.t() - exact).abs().max() / exact.abs().max()))
        for plain in tensors.plain_shards(model[0].weight):
            plain.mul_(-3)
    return off


@pytest.mark.parametrize("name", theory.EXTENSION_BYTES)
def test_a_later_gather_brings_the_rows_of_that_moment(ranks, name):
    for off in ranks(2)(gather_twice, name):
        assert max(off) <= theory.rounding_error(name) + 1e-6


def error_of(fill):
    """The error of a weight, one of whose numbers is this, on each rank."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    with torch.no_grad():
        model[0].weight[0, 0] = fill
    apply_extension(model, init_device_mesh("cpu", (2,)), "int8")
    return tuple(tensors.gather_errors(model))


@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_the_error_of_zeros_is_zero_and_that_of_nan_is_not_hidden(ranks, fill):
    assert ranks(2)(error_of, fill) == [pytest.approx((fill, fill), nan_ok=True)] * 2


def error_of_two_parameters():
    """The errors of a model of two weights, of which bfloat16 holds the first exactly, and of the second alone."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for layers in (2, 1):
        torch.manual_seed(0)
        weights = [nn.Linear(6, 4, bias=False) for _ in range(2)][2 - layers :]
        if layers == 2:
            nn.init.ones_(weights[0].weight)
        found.append(tuple(tensors.gather_errors(apply_extension(nn.Sequential(*weights), mesh, "bf16"))))
    return found


def test_the_error_of_a_model_is_that_of_its_worst_parameter(ranks):
    for both, second in ranks(2)(error_of_two_parameters):
        assert both == second and min(second) > 0


def wire_after_to_empty():
    """What is sent of an uneven weight that was built without memory, and what comes of it."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(6, 5, bias=False, device="meta"), mesh=mesh)
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    assert tensors.extend_model(model, "int8") == 1
    with CommunicationCounter() as counter:
        output = model(torch.ones(1, 6))
    return output.tolist(), counter.bytes["all_gather"]


def test_hooks_stay_on_an_uneven_shard_that_was_built_without_memory(ranks):
    for output, sent in ranks(2)(wire_after_to_empty):
        assert output == [[pytest.approx(6.0, rel=1e-5)] * 5]
        assert sent == theory.gather_bytes((5, 6), 2, "int8") == 3 * 6 + 3 * 4


def held_of_uneven(cases):
    """Bytes that are held while a weight of [5, 6] computes, by what is sent and the dtype to compute in."""
    mesh, held = init_device_mesh("cpu", (2,)), []
    for extension, dtype in cases:
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False))
        apply_extension(model, mesh, extension, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        held.append(tensors.gather_memory_bytes(model))
        assert tensors.leak_bytes(model) == {}
    return held


def test_what_is_held_while_a_unit_computes_is_what_theory_says(ranks):
    cases = [(name, dtype) for name in theory.EXTENSION_BYTES for dtype in (torch.float32, torch.bfloat16)] + [
        ("none", torch.float32),
        ("none", torch.bfloat16),
    ]
    sent = {("none", torch.float32): "fp32", ("none", torch.bfloat16): "bf16"}  # a policy casts before it sends
    for held in ranks(2)(held_of_uneven, cases):
        for (name, dtype), size in zip(cases, held, strict=True):
            how = {"compute_bytes": dtype.itemsize}
            expected = sum(
                theory.held_bytes(shape, 2, sent.get((name, dtype), name), **how) for shape in [(5, 6), (4, 5)]
            )
            assert size == expected, (name, dtype)


def test_theory_of_what_is_held():
    assert theory.held_bytes((5, 6), 2, "fp32") == 6 * 6 * 4
    assert theory.held_bytes((5, 6), 2, "bf16") == 6 * 6 * (2 + 4)
    assert theory.held_bytes((5, 6), 2, "bf16", compute_bytes=2) == 6 * 6 * 2
    assert theory.held_bytes((5, 6), 2, "int8") == 6 * 6 * (1 + 4) + 6 * 4
    assert theory.held_bytes((5, 6), 2, "two_tensor") == 2 * 6 * 6 * 4
    assert theory.held_bytes((5, 6), 2, "two_tensor", compute_bytes=2) == 2 * 6 * 6 * (4 + 2)
    assert theory.pays_below(1000, 0.5, 4) == 1500


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda weight: None, r"a parameter of shape \(5, 6\) became a NoneType: give a tensor of the same shape"),
        (lambda weight: weight[:3], r"became a Tensor of shape \(3, 6\)"),
    ],
)
def test_a_parameter_becomes_a_tensor_of_its_own_shape(made, message):
    with pytest.raises(ValueError, match=message):
        tensors.convert_parameters(nn.Linear(6, 5, bias=False), made)


def test_a_frozen_parameter_stays_frozen():
    model = nn.Linear(6, 5)
    model.bias.requires_grad_(False)
    tensors.convert_parameters(model, tensors.make_two_tensor)
    assert {name: (type(each.data), each.requires_grad) for name, each in model.named_parameters()} == {
        "weight": (TwoTensor, True),
        "bias": (TwoTensor, False),
    }


def timed_gathers(name):
    """Milliseconds of all gathers, and those of them in hooks."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    apply_extension(model, init_device_mesh("cpu", (2,)), name)
    return gather_ms(model)


@pytest.mark.parametrize(("name", "hooks"), [("none", False), ("int8", True), ("two_tensor", True)])
def test_the_time_in_hooks_is_a_part_of_the_gathers_and_none_without(ranks, name, hooks):
    for taken, within in ranks(2)(timed_gathers, name):
        assert 0 <= within < taken
        assert (within > 0) is hooks
