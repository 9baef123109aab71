"""labkit.inductor: real programs that inductor wrote (tests/data), changed by hand where something is to be found."""

import re
from pathlib import Path

import pytest

from labkit import inductor

DATA = Path(__file__).parent / "data"
SAMPLES = ("ddp_coalesced", "ddp_concat", "ddp_coalesced_again", "ddp_concat_again")
EVEN = [16_000_000, 8000] * 4
WIDTHS = (640, 600, 500, 400, 300)

GPU = """
def call(args):
    primals_1, tangents_1 = args
    args.clear()
    s77 = 8
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
        extern_kernels.mm(reinterpret_tensor(tangents_1, (8, 4), (1, 8), 0), primals_1, out=buf0)
        buf1 = empty_strided_cuda((1, 8), (8, 1), torch.float32)
        stream0 = get_raw_stream(0)
        triton_per_fused_sum_0.run(tangents_1, reinterpret_tensor(buf0, (64, ), (1, ), 0), buf1, 8, 4, stream=stream0)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
        triton_poi_fused_add_1.run(buf1, primals_1, 8, stream=stream0)
        buf2 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf1, 2, '0')
        assert_size_stride(buf2, (2, 8), (8, 1))
        buf3 = torch.ops._c10d_functional.wait_tensor.default(buf2)
        buf4 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf3)
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        del buf1
    return (buf0, buf3, )
"""  # written by hand, in the form of a GPU program


def sample(name):
    return (DATA / f"{name}.py.txt").read_text()


def without(code, text, nth=0):
    """The program without the nth of the lines that hold this text."""
    lines = code.splitlines()
    found = [index for index, line in enumerate(lines) if text in line][nth]
    return "\n".join(lines[:found] + lines[found + 1 :])


def sizes_of(bucket):
    return [gradient.bytes for gradient in bucket.gradients]


def test_lines_are_told_apart_in_their_order():
    lines = inductor.parse_lines(sample("ddp_coalesced"))
    assert [line.number for line in lines] == sorted({line.number for line in lines})
    assert [(line.number, line.kind, line.name) for line in lines[:11]] == [
        (2, "other", "="),
        (3, "other", "clear"),
        (4, "other", "assert_size_stride"),
        (5, "allocation", "empty_strided_cpu"),
        (6, "allocation", "empty_strided_cpu"),
        (7, "other", "="),
        (8, "other", "assert_size_stride"),
        (9, "kernel", "cpp_fused_0"),
        (10, "free", "del"),
        (11, "allocation", "empty_strided_cpu"),
        (13, "extern", "mm"),
    ]
    mm = lines[10]
    assert mm.buffers == ("buf1", "arg4_1", "buf2")
    assert mm.text == "extern_kernels.mm(buf1, arg4_1, out=buf2)"
    counted = {kind: sum(line.kind == kind for line in lines) for kind in ("collective", "wait", "kernel", "extern")}
    assert counted == {"collective": 3, "wait": 8, "kernel": 4, "extern": 7}
    assert (lines[-1].kind, lines[-1].name) == ("other", "return")


def test_programs_for_a_gpu_are_read_as_well():
    lines = inductor.parse_lines(GPU)
    shown = [(line.number, line.kind, line.name) for line in lines if line.kind not in ("other", "allocation")]
    assert shown == [
        (9, "extern", "mm"),
        (12, "kernel", "triton_per_fused_sum_0"),
        (13, "collective", "all_reduce_"),
        (14, "kernel", "triton_poi_fused_add_1"),
        (15, "collective", "all_gather_into_tensor"),
        (17, "wait", "wait_tensor"),
        (18, "extern", "_scaled_dot_product_flash_attention"),
        (19, "wait", "wait_tensor"),
        (20, "free", "del"),
    ]
    assert next(line for line in lines if line.name == "mm").buffers == ("tangents_1", "primals_1", "buf0")
    [bucket] = inductor.find_buckets(GPU)
    assert bucket.gradients == (inductor.Gradient("buf0", (8, 8), "bfloat16", 128),)
    assert [line.number for line in bucket.hidden_by] == [14, 18]
    assert not inductor.missing_waits(GPU)


@pytest.mark.parametrize("mode", ["coalesced", "concat"])
def test_three_buckets_of_four_linears_at_25_megabytes(mode):
    """What fuses the gradients does not change which of them travel together."""
    found = inductor.find_buckets(sample(f"ddp_{mode}"))
    assert [sizes_of(bucket) for bucket in found] == [EVEN[:1], EVEN[1:5], EVEN[5:]]
    assert [bucket.bytes for bucket in found] == [16_000_000, 32_016_000, 16_016_000]
    assert [bucket.index for bucket in found] == [0, 1, 2]
    shapes = [gradient.shape for bucket in found for gradient in bucket.gradients]
    assert shapes == [(2000, 2000), (2000,)] * 4, "concat sends them flat, and gives them back in their shapes"
    assert {gradient.dtype for bucket in found for gradient in bucket.gradients} == {"float32"}


@pytest.mark.parametrize(
    ("mode", "requests", "waits", "hidden"),
    [
        ("coalesced", [23, 52, 66], [[68], [70, 72, 74, 76], [78, 80, 82]], [7, 2, 0]),
        ("concat", [22, 89, 134], [[136], [138], [140]], [10, 4, 0]),
    ],
)
def test_all_waits_come_last_and_what_lies_before_hides_the_bucket(mode, requests, waits, hidden):
    found = inductor.find_buckets(sample(f"ddp_{mode}"))
    assert [bucket.request.number for bucket in found] == requests
    assert [[wait.number for wait in bucket.waits] for bucket in found] == waits
    assert [len(bucket.hidden_by) for bucket in found] == hidden
    assert {line.kind for bucket in found for line in bucket.hidden_by} == {"kernel", "extern"}


@pytest.mark.parametrize("mode", ["coalesced", "concat"])
def test_gradients_that_are_present_are_added_to_and_expose_the_bucket(mode):
    """Each parameter has a size of its own here, which proves the order."""
    sizes = [4 * WIDTHS[index] * columns for index in (4, 3, 2, 1) for columns in (WIDTHS[index - 1], 1)]
    buckets = inductor.find_buckets(sample(f"ddp_{mode}_again"))
    assert [sizes_of(bucket) for bucket in buckets] == [sizes[:3], sizes[3:]]
    assert [len(bucket.hidden_by) for bucket in buckets] == [0, 0], "the copy into .grad comes at once, and waits"
    assert not inductor.missing_waits(sample(f"ddp_{mode}_again"))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_program_of_inductor_waits_for_everything(name):
    assert inductor.missing_waits(sample(name)) == []


@pytest.mark.parametrize(
    ("name", "wait", "request_line"),
    [
        ("ddp_coalesced", 0, 23),
        ("ddp_coalesced", 3, 52),  # three others of the same bucket are waited for
        ("ddp_coalesced", 7, 66),
        ("ddp_concat", 1, 89),
        ("ddp_coalesced_again", 1, 69),
        ("ddp_concat_again", 0, 133),
    ],
)
def test_a_wait_that_was_taken_out_is_found(name, wait, request_line):
    broken = without(sample(name), "wait_tensor", wait)
    assert [line.number for line in inductor.missing_waits(broken)] == [request_line]
    assert len(inductor.find_buckets(broken)) == len(inductor.find_buckets(sample(name)))


def test_a_wait_that_comes_after_the_first_use_is_too_late():
    code = sample("ddp_concat_again")
    lines = code.splitlines()
    wait = next(index for index, line in enumerate(lines) if "wait_tensor" in line)
    assert "cpp_fused_copy_" in lines[wait + 3]
    moved = [*lines[:wait], *lines[wait + 1 : wait + 4], lines[wait], *lines[wait + 4 :]]
    [late] = inductor.missing_waits("\n".join(moved))
    assert late.name == "all_reduce_"
    assert inductor.find_buckets("\n".join(moved))[0].waits, "somebody waits, but too late"


def test_a_result_that_is_only_freed_was_never_waited_for():
    lost = without(GPU, "wait_tensor", 1).replace("(buf0, buf3, )", "(buf3, )")
    [line] = inductor.missing_waits(lost)
    assert line.name == "all_reduce_"
    assert inductor.find_buckets(lost)[0].waits == ()


def test_a_result_of_its_own_is_followed_under_all_its_names():
    assert [line.name for line in inductor.missing_waits(without(GPU, "wait_tensor", 0).replace("buf3", "buf2"))] == [
        "all_gather_into_tensor"
    ]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def forward(x):\n    return x\n", r"no function call\(\) in 2 lines: give the whole program"),
        ("def call(args:\n", r"line 1: not Python \("),
    ],
)
def test_other_text_is_refused(code, problem):
    with pytest.raises(ValueError, match=problem):
        inductor.parse_lines(code)


@pytest.mark.parametrize(("shape", "dtype"), [("(s77, 8)", "bfloat16"), ("(8, 8)", "float8_e4m3fn")])
def test_a_tensor_of_unknown_size_is_refused(shape, dtype):
    code = GPU.replace("((8, 8), (8, 1), torch.bfloat16)", f"({shape}, (8, 1), torch.{dtype})")
    with pytest.raises(ValueError, match=r"line 13 sends buf0 of shape.* dtype .*: .*compile with dynamic=False"):
        inductor.find_buckets(code)


def test_a_listing_shows_requests_waits_and_what_lies_between():
    shown = repr(inductor.ProgramListing(sample("ddp_coalesced"))).splitlines()
    assert len(shown) == 23
    assert shown[3:6] == [
        "   21  kernel      cpp_fused_1(buf4)",
        "   23  collective  all_reduce_(buf4)  asks for bucket 0",
        "   27  extern      mm(buf2, arg3_1, buf7)",
    ]
    assert shown[-2] == "   82  wait        wait_tensor(buf28)  waits for bucket 2"
    assert shown[-1] == "   83  return      return(buf18, buf16, buf4, buf15, ... 8 in all)"
    many = repr(inductor.ProgramListing(sample("ddp_concat")))
    assert "cpp_fused_3(buf13, buf15, buf18, buf20, ... 10 in all)" in many
    assert max(map(len, many.splitlines())) < 100


GRADIENTS = [f"fc{layer}.{part}" for layer in (4, 3, 2, 1) for part in ("weight", "bias")]


def test_buffers_carry_the_names_of_what_they_hold():
    code = sample("ddp_coalesced")
    names = inductor.name_buffers(code, GRADIENTS)
    weights = {"arg4_1": "fc4.weight", "arg3_1": "fc3.weight", "arg2_1": "fc2.weight"}  # fc1's is not needed
    inputs = {"arg7_1": "fc4.input", "arg6_1": "fc3.input", "arg5_1": "fc2.input", "arg1_1": "fc1.input"}
    assert {name: held for name, held in names.items() if name.startswith("arg")} == weights | inputs
    assert names["buf2"] == "fc3.output.grad" and names["buf3"] == names["buf4"] == "fc4.weight.grad"
    assert [names[f"buf{index}"] for index in (15, 16, 17, 18)] == [
        "fc4.bias.grad", "fc3.weight.grad", "fc3.bias.grad", "fc2.weight.grad",
    ]  # fmt: skip
    shown = repr(inductor.ProgramListing(code, names))
    assert "mm(buf2: fc3.output.grad, arg3_1: fc3.weight, buf7: fc2.output.grad)" in shown
    assert "wait_tensor(buf28: fc2.bias.grad)  waits for bucket 2" in shown


def test_a_flat_buffer_of_several_gradients_is_called_so():
    names = inductor.name_buffers(sample("ddp_concat"), GRADIENTS)
    assert (names["buf4"], names["buf26"], names["buf42"]) == ("fc4.weight.grad", "4 gradients", "3 gradients")
    with pytest.raises(ValueError, match="8 gradients travel in the program, and 7 are named"):
        inductor.name_buffers(sample("ddp_concat"), GRADIENTS[:-1])


def test_a_listing_in_a_notebook_has_the_same_lines_in_colours_and_the_whole_program_folded_away():
    code = sample("ddp_coalesced").replace("cpp_fused_1(buf4)", "cpp_fused_1(buf4 if 1 < 2 else 0)")
    listing = inductor.ProgramListing(code)
    html = listing._repr_html_()
    short, _, whole = html.partition("<details>")
    assert short.count("<span") == 23
    assert all(colour in short for colour in inductor.KIND_COLOURS.values())
    assert "asks for bucket 2" in short
    assert "overflow-x:auto" in short
    assert "   21          cpp_fused_1(buf4 if 1 &lt; 2 else 0)" in whole, "numbered as above"
    assert "1 < 2" not in html
    assert f"the whole program, {len(listing.full_text.splitlines())} lines" in whole


def test_a_listing_marks_the_request_and_what_hides_it_for_each_bucket():
    html = inductor.ProgramListing(sample("ddp_coalesced"))._repr_html_()
    rows = re.findall(r'<div class="([^"]*)"( tabindex="0" title="[^"]*")?> *(\d+)<', html)
    for bucket in inductor.find_buckets(sample("ddp_coalesced")):
        by_class = {name: [] for name in ("asks", "waits", "hides")}
        for classes, focus, number in rows:
            for name, lines in by_class.items():
                if f"{name}-{bucket.index}" in classes.split():
                    lines.append(int(number))
                    assert name == "hides" or focus, "the keyboard reaches it"
        lines = {"asks": [bucket.request], "waits": bucket.waits, "hides": bucket.hidden_by}
        assert by_class == {name: [line.number for line in found] for name, found in lines.items()}
        assert f".labkit-program:has(.asks-{bucket.index}:hover" in html
    assert 'title="bucket 2, asked for in line 66: nothing computes meanwhile"' in html


def test_a_listing_names_no_folder_of_this_machine():
    paths = '#include "/tmp/torchinductor_me/2r/c2rnilspx43.h"\n# kernel path: /tmp/torchinductor_me/gi/cgixx.py\n'
    code = paths + "# tmp0/tmp1 // a comment, /root/.cache/x.py\n" + sample("ddp_concat")
    full = inductor.ProgramListing(code).full_text
    assert full.startswith('#include "c2rnilspx43.h"\n# tmp0/tmp1 // a comment, x.py\n')
    assert full.endswith(sample("ddp_concat"))
