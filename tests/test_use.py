"""labkit.run(..., use=...): the solved notebooks' own functions train the real networks, and wrong ones fail parity."""

import ast
import linecache
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import labkit
from labkit import plots
from labkit.errors import ParameterError, RankFailed
from labkit.launcher import run as launcher
from labkit.parallel import small_tensor_parallel
from labkit.parallel.halo import Strip, pad_with_halo
from labkit.parallel.small_ddp import averaging_with, small_ddp
from labkit.tensors import pad_rows
from labkit.theory.ddp import chain_buckets
from labkit_course.checks.fsdp import gather_and_free as gather_check
from labkit_course.checks.fsdp import replace_source_line

pytestmark = pytest.mark.alone  # 28 s; beside other launches, these collectives on four ranks took 156 s

SOURCES = Path(__file__).resolve().parents[1] / "notebooks" / "src"


def solved(lab, *names):
    """Functions of a solved notebook, as its kernel has them: after its imports, in no file that a rank could read."""
    (path,) = SOURCES.glob(f"{lab}_*.py")
    tree = ast.parse(path.read_text())
    imports = (ast.Import, ast.ImportFrom)
    wanted = [node for node in tree.body if isinstance(node, imports) or getattr(node, "name", "") in names]
    known = in_a_cell(f"<{lab}>", "\n\n".join(map(ast.unparse, wanted)))
    return {name: known[name] for name in names}


def in_a_cell(file, text):
    """What a cell of code defines."""
    known = {"__name__": "__main__"}
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), known)
    return known


def losses(result):
    frame = result.frame
    return list(frame[(frame["name"] == "loss") & (frame["rank"] == 0)]["value"])


def parity(program, **arguments):
    result = labkit.check(program, device="cpu", **arguments)
    assert result.ok, result.verdict_text


def fails_parity(program, **arguments):
    result = labkit.check(program, device="cpu", **arguments)
    assert not result.ok and "differ" in result.verdict_text, result
    return result


SPATIAL = {"nproc": 4, "strategy": "yours"}


def trains_as_labkits_own(use):
    """Parity with one device, and the losses and bytes of labkit's exchange; the run with these functions."""
    parity("convnext_spatial", use=use, **SPATIAL)
    yours, ours = (
        labkit.run("convnext_spatial", nproc=4, device="cpu", steps=5, learning_rate=1e-3, **how)
        for how in ({"strategy": "yours", "use": use}, {"strategy": "local"})
    )
    assert losses(yours) == pytest.approx(losses(ours), rel=1e-5)
    assert yours.value("send_bytes") == ours.value("send_bytes")
    return yours


def test_the_learners_halo_exchange_trains_convnext(monkeypatch):
    use = solved("01", "exchange_halo", "return_gradients")
    yours = trains_as_labkits_own(use)
    assert "def exchange_halo" in yours.info["use"]["exchange_halo"]


def test_an_autograd_function_of_the_learner_trains_convnext():
    names = ("exchange_halo", "return_gradients", "HaloExchange", "padded_strip")
    use = {"padded_strip": solved("01", *names)["padded_strip"]}
    trains_as_labkits_own(use | solved("01", "reduce_gradients"))


class NothingComesHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx, strip, halo, rank, ranks):
        ctx.halo = halo
        return pad_with_halo(strip, halo, Strip(3, None, rank, ranks))

    @staticmethod
    def backward(ctx, grad):
        return grad[..., ctx.halo : -ctx.halo], None, None, None


def forgets_gradients(strip, halo, rank, ranks):
    return NothingComesHome.apply(strip, halo, rank, ranks)


def test_a_wrong_autograd_function_fails_parity():
    fails_parity("convnext_spatial", use={"padded_strip": forgets_gradients}, **SPATIAL)


def from_the_wrong_side(strip, halo, rank, ranks):
    own = torch.nn.functional.pad(strip, (halo, halo))
    edges = [torch.empty_like(strip[..., :halo].contiguous()) for _ in range(2)]
    calls = []
    for edge, outgoing, peer in ((0, strip[..., -halo:], rank - 1), (1, strip[..., :halo], rank + 1)):
        if 0 <= peer < ranks:
            calls += [dist.isend(outgoing.contiguous(), peer), dist.irecv(edges[edge], peer)]
    for call in calls:
        call.wait()
    if rank > 0:
        own[..., :halo] = edges[0]
    if rank < ranks - 1:
        own[..., -halo:] = edges[1]
    return own


def test_a_wrong_halo_exchange_fails_parity():
    fails_parity("convnext_spatial", use={"exchange_halo": from_the_wrong_side}, **SPATIAL)
    fails_parity(
        "convnext_spatial", use={"return_gradients": lambda g, halo, rank, ranks: g[..., halo:-halo]}, **SPATIAL
    )


@pytest.mark.parametrize("name", ["averaged", "not_reduced"])
def test_gradients_that_are_not_added_up_fail_parity(name):
    fails_parity("convnext_spatial", use={"reduce_gradients": globals()[name]}, **SPATIAL)


def averaged(cut, head):
    for gradient in cut:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def not_reduced(cut, head):
    pass


def test_a_policy_chooses_fsdps_units():
    use = {"is_unit": lambda module: isinstance(module, nn.Linear) and module.out_features > 1}
    parity("fsdp_wrap", wrap="yours", model="mlp_stack", use=use)
    count = {
        wrap: labkit.run("fsdp_wrap", device="cpu", model="mlp_stack", steps=1, wrap=wrap, **more).value(
            "all_gather_count"
        )
        for wrap, more in (("yours", {"use": use}), ("layer", {}), ("block", {}))
    }
    assert count["yours"] == count["layer"] > count["block"]
    with pytest.raises(RankFailed, match="is_unit chose no module of MLPStack"):
        labkit.run("fsdp_wrap", model="mlp_stack", wrap="yours", use={"is_unit": lambda module: False})


SMALL_FSDP = {"fsdp": "yours", "model": "mlp_stack"}


STEPS = ("shard_parameters", "gather_and_free", "reduce_and_free")


def small_fsdp(**changed):
    """The notebook's own three steps as one function, some of them changed."""
    first, second, third = (solved("02", *STEPS) | changed).values()

    def shard_unit(unit):
        shard, full = first(unit)
        second(unit, shard, full)
        third(unit, shard, full)
        return shard

    return {"small_fsdp": shard_unit}


def test_the_learners_small_fsdp_trains_the_stack():
    use = small_fsdp()
    for wrap, ranks in (("block", 2), ("layer", 3), ("root", 2)):
        parity("fsdp_wrap", nproc=ranks, wrap=wrap, steps=3, use=use, **SMALL_FSDP)
    sizes = {"device": "cpu", "model": "mlp_stack", "dim": 32, "steps": 3}
    yours, ours = (labkit.run("fsdp_wrap", **sizes, **how) for how in ({"fsdp": "yours", "use": use}, {"fsdp": 2}))
    assert losses(yours) == pytest.approx(losses(ours), rel=1e-5)
    for name in ("all_gather_count", "all_gather_bytes", "reduce_scatter_count", "reduce_scatter_bytes"):
        assert yours.value(name) == ours.value(name)
    assert yours.value("end_parameter_bytes") == ours.value("end_parameter_bytes")


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("shard.grad /= ranks", "pass"),
        (
            "dist.reduce_scatter_tensor(shard.grad, gradients)",
            "shard.grad.copy_(gradients.chunk(ranks)[dist.get_rank()])",
        ),
    ],
)
def test_a_small_fsdp_that_does_not_divide_or_does_not_reduce_fails_parity(line, instead):
    broken = replace_source_line(solved("02", "reduce_and_free")["reduce_and_free"], line, instead)
    fails_parity("fsdp_wrap", steps=3, use=small_fsdp(reduce_and_free=broken), **SMALL_FSDP)


def test_the_check_of_gathering_sees_a_shard_that_autograd_follows():
    (right,) = solved("02", "gather_and_free").values()
    line = "dist.all_gather_into_tensor(full, shard.detach())"
    attached = replace_source_line(right, line, line.replace(".detach()", ""))
    assert "autograd records all_gather_into_tensor of the shard" in repr(gather_check(attached))


def test_a_mutant_takes_a_line_that_is_there_once():
    (right,) = solved("02", "gather_and_free").values()
    with pytest.raises(ValueError, match=r"'shard\.grad = 0' stands 0 times in gather_and_free"):
        replace_source_line(right, "shard.grad = 0")
    with pytest.raises(ValueError, match=r"stands 2 times in repeated: take a line that stands once"):
        replace_source_line(repeated, "first += 1")


def repeated(first):
    first += 1
    first += 1
    return first


TWO_TENSOR = {"extension": "your_type", "steps": 3}


def two_tensor(**changed):
    """What the notebook's own class makes of a weight, with methods of its own or with others."""
    kind = solved("03b", "new_two", "dispatch", "pre_all_gather", "post_all_gather", "TwoTensor")["TwoTensor"]
    kind = type("Changed", (kind,), changed) if changed else kind
    return {"parameter": lambda weight: kind(weight, weight.clone())}


def test_the_learners_two_tensor_trains_exactly_as_plain_parameters_do():
    use = two_tensor()
    run = labkit.check("allgather_extensions", device="cpu", extension="your_type", steps=10, use=use)
    assert (run.value("compared"), run.value("max_rel_error")) == (400, 0)
    yours, ours = (
        labkit.run("allgather_extensions", device="cpu", **how)
        for how in (TWO_TENSOR | {"use": use}, {"extension": "two_tensor", "steps": 3})
    )
    assert losses(yours) == losses(ours)
    assert yours.value("all_gather_bytes") == ours.value("all_gather_bytes")
    assert yours.value("held_bytes") == ours.value("held_bytes")


def remembering(self, mesh, outer_size, outer_stride, module, policy):
    """A hook that sends what it sent at the first gather."""
    if not hasattr(self, "kept"):
        rows = -(-outer_size[0] // mesh.size())
        self.kept = pad_rows(self.a, rows).clone(), pad_rows(self.b, rows).clone()
    return self.kept, None


def test_a_hook_that_remembers_fails_parity_and_one_that_sends_a_twice_cannot():
    fails_parity("allgather_extensions", use=two_tensor(fsdp_pre_all_gather=remembering), **TWO_TENSOR)
    (only_a,) = solved("03b", "only_a").values()
    parity("allgather_extensions", use=two_tensor(fsdp_pre_all_gather=only_a), **TWO_TENSOR)


def test_a_parameter_that_becomes_nothing_is_refused():
    with pytest.raises(RankFailed, match=r"became a NoneType: give a tensor of the same shape"):
        labkit.run("allgather_extensions", device="cpu", use={"parameter": lambda weight: None}, **TWO_TENSOR)


def test_encode_and_decode_decide_what_is_gathered():
    first, second = solved("03", "encode_8bit", "decode_8bit").values()
    yours = labkit.run(
        "allgather_extensions", device="cpu", steps=3, extension="yours", use={"encode": first, "decode": second}
    )
    fp32 = labkit.run("allgather_extensions", device="cpu", steps=3, extension="fp32")
    assert 0.25 < yours.value("all_gather_bytes") / fp32.value("all_gather_bytes") < 0.3
    assert losses(yours) == pytest.approx(losses(fp32), rel=0.02) and losses(yours) != losses(fp32)
    exact = {"encode": lambda shard: (shard[..., :4].contiguous(), shard[..., 4:].contiguous())}
    parity(
        "allgather_extensions", extension="yours", use=exact | {"decode": lambda sent, dtype: torch.cat([*sent], -1)}
    )
    fails_parity("allgather_extensions", extension="yours", use={"encode": lambda shard: (shard * 1.01,)})


def a_gradient_each(sizes, limit):
    return [[place] for place in range(len(sizes))]


def test_hooks_of_the_notebook_train_the_network_and_encode_each_time():
    use = solved("03", "encode_8bit", "decode_8bit", "add_hooks", "send_8bit", "second_hooks", "send_second")
    use |= {"encode": use["encode_8bit"], "decode": use["decode_8bit"], "hooks": use["add_hooks"]}
    how = {"device": "cpu", "steps": 3, "batch": 4}
    runs = {
        name: labkit.run("allgather_extensions", extension="your_hooks", use={"add_hooks": named(use, name)}, **how)
        for name in ("send_8bit", "send_second")
    }
    int8 = labkit.run("allgather_extensions", extension="int8", **how)
    values = ("all_gather_bytes", "peak_total_bytes", "weight_error")
    assert [runs["send_8bit"].value(each) for each in values] == [int8.value(each) for each in values]
    assert losses(runs["send_8bit"]) == losses(int8) != losses(runs["send_second"])
    assert runs["send_second"].value("weight_error") > 2 * int8.value("weight_error")


def named(functions, name):
    """One of the functions, which finds the others by their names."""
    functions[name].__globals__.update(functions)
    return functions[name]


def test_a_rule_fills_the_buckets_of_a_ddp():
    use = {"bounded_buckets": a_gradient_each}
    parity("ddp_compile", mode="yours", dim=64, bucket_mb=0.01, use=use)
    sizes = {"device": "cpu", "dim": 64, "bucket_mb": 0.03, "steps": 1, "mode": "yours"}
    yours, ours = (labkit.run("ddp_compile", **sizes, **more) for more in ({"use": use}, {}))
    assert yours.value("all_reduce_count") == 8 and ours.value("all_reduce_count") == 2
    with pytest.raises(RankFailed, match=r"the buckets \[\[0\]\] do not hold each of the gradients 0 to 7 once"):
        labkit.run("ddp_compile", **sizes, use={"bounded_buckets": lambda sizes, limit: [[0]]})


def test_the_learners_small_ddp_trains_the_deep_network_and_a_broken_one_fails_parity():
    deep = {"mode": "yours", "dim": 16, "layers": 100, "bucket_mb": 0.01}
    plan, average, send = solved("04", "bucket_plan", "average_buckets", "send_full_buckets").values()
    forgetful = replace_source_line(average, "row /= dist.get_world_size()")

    def theirs(model, bucket_bytes, finish=average):
        parameters = list(model.parameters())[::-1]
        buckets = plan([parameter.nbytes for parameter in parameters], bucket_bytes)
        send([[parameters[place] for place in bucket] for bucket in buckets], finish)

    for data_parallel in (theirs, small_ddp):
        parity("ddp_compile", use={"data_parallel": data_parallel}, **deep)
    broken = {"data_parallel": lambda model, bucket_bytes: theirs(model, bucket_bytes, forgetful)}
    fails_parity("ddp_compile", use=broken, **deep)
    run = labkit.run("ddp_compile", device="cpu", steps=1, use={"data_parallel": theirs}, **deep)
    assert run.value("all_reduce_count") == len(chain_buckets(16, 0.01, layers=100))


def test_each_size_of_bucket_is_timed_in_every_step():
    sizes = (0.0001, 0.5, 25)
    how = {"device": "cpu", "dim": 8, "steps": 3, "sizes_mb": sizes}
    for mode in ({"mode": "yours", "use": {"data_parallel": small_ddp}}, {"mode": "ddp"}):
        result = labkit.run("ddp_compile", **mode, **how)
        spans = result.frame[result.frame["kind"] == "span"].groupby("name").size()
        assert [spans[name] for name in ("0.0001 MiB", "0.5 MiB", "25 MiB")] == [6, 6, 6], "2 ranks, 3 steps"
        assert list(plots.step_ms_by_size(result)) == ["0.0001 MiB", "0.5 MiB", "25 MiB"]
    with pytest.raises(ParameterError, match="sizes_mb compares times of mode yours or ddp"):
        labkit.run("ddp_compile", mode="replicate", sizes_mb=sizes)


def by_hooks(model, bucket_bytes):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def average_and_more(parameter):
    average(parameter)
    parameter.grad *= 1.01


def slightly_off(model, bucket_bytes):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average_and_more)


def test_a_ddp_of_ones_own():
    parity("ddp_compile", mode="yours", dim=64, use={"data_parallel": by_hooks})
    fails_parity("ddp_compile", mode="yours", dim=64, use={"data_parallel": slightly_off})


def test_the_learners_ring_all_reduce_averages_gradients_and_a_broken_one_fails_parity():
    ring, broken = solved("00", "ring_all_reduce", "broken_ring").values()
    small = {"mode": "yours", "dim": 16}
    for ranks in (2, 3):  # 16 numbers and 3 ranks: parts of unequal length
        parity("ddp_compile", nproc=ranks, **small, use={"data_parallel": averaging_with(ring)})
    fails_parity("ddp_compile", **small, use={"data_parallel": averaging_with(broken)})
    yours = labkit.run("ddp_compile", device="cpu", steps=1, **small, use={"data_parallel": averaging_with(ring)})
    ours = labkit.run("ddp_compile", device="cpu", steps=1, mode="ddp", dim=16)
    assert yours.value("send_bytes") == ours.value("all_reduce_wire_bytes") > 0
    with pytest.raises(RankFailed, match="the all-reduce returned None"):
        labkit.run("ddp_compile", **small, use={"data_parallel": averaging_with(lambda mine, rank, ranks: None)})


def columns_only(model):
    return {"layers.*.in_proj": ColwiseParallel(), "layers.*.out_proj": ColwiseParallel()}


def test_a_plan_cuts_the_stack():
    right = {"layers.*.in_proj": ColwiseParallel(), "layers.*.out_proj": RowwiseParallel()}
    parity("two_dim", nproc=4, compile=False, use={"tensor_parallel_plan": lambda model: right})
    with pytest.raises(RankFailed):
        parity("two_dim", nproc=4, compile=False, use={"tensor_parallel_plan": columns_only})


OWN_LAYERS = {"nproc": 4, "layers": "yours", "compile": False, "steps": 2}


def own_layers():
    """The notebook's two layers, with the learner's functions and second layer, as the notebook has them."""
    functions = solved("05", "CopyToRanks", "SumOverRanks")
    layers = solved("05", "ColumnParallel", "RowParallel")
    for layer in layers.values():
        layer.forward.__globals__.update(
            copy_to_ranks=functions["CopyToRanks"].apply, sum_over_ranks=functions["SumOverRanks"].apply
        )
    return layers


def test_the_learners_layers_train_the_stack_on_both_axes():
    column, row = own_layers().values()
    use = {"column_parallel": column, "row_parallel": row}
    parity("two_dim", use=use, **OWN_LAYERS)
    yours, ours = (
        labkit.run("two_dim", nproc=4, device="cpu", dim=16, steps=2, **how)
        for how in ({"layers": "yours", "use": use}, {})
    )
    assert losses(yours) == pytest.approx(losses(ours), rel=1e-5)
    names = [name for name in ours.summary() if name.endswith(("_count", "_bytes")) and "/" in name]
    assert "tp/all_reduce_bytes" in names
    assert {name: yours.value(name) for name in names} == {name: ours.value(name) for name in names}


class Forgetful(small_tensor_parallel.ColumnParallel):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class BiasOnEachRank(small_tensor_parallel.RowParallel):
    def forward(self, x):
        part = nn.functional.linear(x, self.weight, self.bias)
        return small_tensor_parallel.sum_over_ranks(part, self.group)


def test_layers_that_forget_a_sum_or_add_the_bias_on_each_rank_fail_parity():
    fails_parity("two_dim", use={"column_parallel": Forgetful}, **OWN_LAYERS)
    fails_parity("two_dim", use={"row_parallel": BiasOnEachRank}, **OWN_LAYERS)
    with pytest.raises(RankFailed, match=r"layers\.0\.in_proj: one of 2 ranks needs a module with parameters"):
        parity("two_dim", use={"column_parallel": lambda layer, group: layer}, **OWN_LAYERS)


TRANSFORMER = {"nproc": 4, "network": "transformer", "compile": False}


def of_all_blocks(plan):
    """What a run is given: a block's plan for every block."""
    return {"tensor_parallel_plan": lambda model: {f"blocks.*.{name}": cut for name, cut in plan().items()}}


@pytest.mark.long
def test_the_learners_plan_trains_a_transformer_and_the_copied_one_is_caught_by_parity_and_not_by_the_loss():
    known = solved("05", "block_plan", "copied_plan")
    right, copied = map(of_all_blocks, known.values())
    parity("two_dim", use=right, **TRANSFORMER)
    caught = fails_parity("two_dim", use=copied, **TRANSFORMER)
    assert caught.value("max_rel_error") == pytest.approx(1, abs=0.1), "twice as large"
    curves = [
        losses(labkit.run("two_dim", nproc=4, device="cpu", network="transformer", steps=3, use=use))
        for use in (right, copied)
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


HELPER = 3


def scaled(strip):
    return strip * HELPER


def uses_others(strip, halo, rank, ranks):
    raise RuntimeError(f"helpers came along: {scaled(torch.ones(1)).item()}")


def test_a_function_travels_with_its_helpers_and_its_lines():
    with pytest.raises(RankFailed, match=r"helpers came along: 3\.0") as caught:
        labkit.run("convnext_spatial", nproc=2, strategy="yours", use={"exchange_halo": uses_others})
    assert 'raise RuntimeError(f"helpers came along' in caught.value.traceback
    cell = in_a_cell("<cell 7>", "def broken(strip, halo, rank, ranks):\n    return strip[0, 0, 0, 0, 0]\n")
    with pytest.raises(RankFailed) as caught:
        labkit.run("convnext_spatial", strategy="yours", use={"exchange_halo": cell["broken"]})
    assert 'File "<cell 7>", line 2, in broken\n    return strip[0, 0, 0, 0, 0]' in caught.value.traceback


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            {"exchange": print},
            "use= gives 'exchange', and convnext_spatial lets replace exchange_halo(strip, halo, rank",
        ),
        ({"exchange_halo": 3}, "use= gives exchange_halo = 3, which is no function"),
        ({"exchange_halo": lambda strip, halo: 0}, "use= gives exchange_halo(strip, halo), and convnext_spatial"),
        ([print], "is no dict"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_a_start(use, message, monkeypatch):
    monkeypatch.setattr(launcher.process, "start_torchrun", lambda *arguments: pytest.fail("a run was started"))
    with pytest.raises(ParameterError) as caught:
        labkit.run("convnext_spatial", strategy="yours", use=use)
    assert message in str(caught.value)


def test_a_function_that_is_never_called_fails_the_run():
    with pytest.raises(RankFailed, match="use= gave exchange_halo, and this run never called it"):
        labkit.run("convnext_spatial", strategy="local", steps=1, use={"exchange_halo": from_the_wrong_side})


def test_a_program_of_ones_own_declares_what_can_be_replaced(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(
        textwrap.dedent("""
            from labkit import rank

            @rank.replaceable
            def greet(name, /, times, *, loud):
                return name

            print(greet("ada", 2, loud=True))
        """)
    )
    result = labkit.run(program, use={"greet": lambda name, times, loud: f"{name} {times} {loud}"})
    assert result.ranks[1].log() == "ada 2 True\n"
    with pytest.raises(ParameterError, match="calls greet"):
        labkit.run(program, use={"greet": lambda name, times: name})
    with pytest.raises(ParameterError, match="lets replace no function"):
        labkit.run("all_reduce", use={"greet": print})


def test_what_a_cells_function_uses_is_found_when_it_is_compiled(tmp_path):
    program = tmp_path / "compiles.py"
    program.write_text(
        textwrap.dedent("""
            import torch
            from labkit import rank

            @rank.replaceable
            def make():
                return torch.neg

            inner = make()
            outer = torch.compile(lambda x: inner(x), backend="eager", fullgraph=True)
            print(outer(torch.ones(1)).item())
        """)
    )
    code = """
        class Factor:
            def __init__(self):
                self.value = 3.0

        def triple(x):
            return x * Factor().value

        def make():
            return triple
    """
    cell = in_a_cell("<cell 8>", textwrap.dedent(code))
    assert labkit.run(program, nproc=1, use={"make": cell["make"]}).ranks[0].log() == "3.0\n"
