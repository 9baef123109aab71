"""Every cell of the FSDP test bench in one launch: each is compared with one device, and its verdict is recorded."""

import contextlib
import functools
import itertools
import json
from dataclasses import dataclass
from unittest import mock

from labkit import instrument, rank
from labkit.models.catalog import MODELS
from launch import fsdp_matrix


@dataclass
class Config:
    """Which part of the grid."""

    fsdp: int = 2
    """1 or 2."""
    every: int = 1
    """Each cell, each second one, and so on."""


ONCE = ("root", "layer", "every", "size")
OPTIONS = [
    {"model": "toy", "precision": "fp16"},
    {"model": "transformer", "precision": "fp16"},
    {"model": "transformer", "precision": "bf16", "wrap": "layer"},
    {"model": "toy", "precision": "pure_fp16"},
    {"model": "transformer", "precision": "pure_fp16"},
    {"model": "toy", "precision": "autocast"},
    {"model": "hf_bert", "precision": "autocast"},
    {"model": "toy", "scaler": True},
    {"model": "nonuniform", "scaler": True, "precision": "fp16"},
    {"model": "transformer", "accumulate": 3},
    {"model": "moe", "accumulate": 2},
    {"model": "mlp_stack", "input_grad": True},
    {"model": "double_linear", "input_grad": True, "accumulate": 2},
    {"model": "transformer", "ignore": ("TransformerDecoderLayer",)},
    {"model": "skip", "ignore": ("SkipModule",)},
    {"model": "delay", "delay_after_loss_ms": 5, "delay_before_reduction_ms": 5},
    {"model": "moe", "delay_before_free_ms": 5},
]
OWN = {
    1: [
        {"model": "transformer", "use_orig_params": False},
        {"model": "nested", "backward_prefetch": "post"},
        {"model": "nested", "backward_prefetch": "none", "forward_prefetch": True, "limit_all_gathers": False},
    ],
    2: [{"model": "skip", "wrap": "none", "ignore": ("SkipModule",)}, {"model": "transformer", "prefetch": True}],
}


def cells(fsdp):
    """Parameters of fsdp_matrix: model x checkpointing x mixed precision x offload (FSDP2), other wraps,
    all options.
    """
    names = ("model", "checkpointing", "precision", "offload")
    choices = (MODELS, (False, True), ("fp32", "bf16"), (False, True) if fsdp == 2 else (False,))
    grid = [{"wrap": "block"} | dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]
    grid += [{"model": model, "wrap": wrap, "min_numbers": 60} for model, wrap in itertools.product(MODELS, ONCE)]
    if fsdp == 2:  # without a unit there is no difference; unused_linear is refused
        averaged = [model for model in MODELS if model != "unused_linear"]
        both = itertools.product(averaged, (False, True))
        grid += [{"model": model, "wrap": "none", "checkpointing": checkpointing} for model, checkpointing in both]
    return [cell | {"fsdp": fsdp} for cell in [*grid, *OPTIONS, *OWN[fsdp]]]


def controls(fsdp):
    """Cells whose gradients are reduced to 1 % too much, which the comparison must see."""
    wrong = [{"model": model, "wrap": "block", "wrong": True} for model in MODELS]
    wrong += [{"model": "toy", "wrap": "none", "wrong": True}] if fsdp == 2 else []
    return [cell | {"fsdp": fsdp} for cell in wrong]


def one_percent_more(originals, name, output, *rest, **named):
    """A reduction that is a little off: of an all-reduce's one tensor, of a reduce-scatter's second."""
    if name == "all_reduce":
        if output.is_floating_point():
            output.mul_(1.01)
        return originals[name](output, *rest, **named)
    if rest:
        return originals[name](output, rest[0] * 1.01, *rest[1:], **named)
    return originals[name](output, **named | {"input": named["input"] * 1.01})


@contextlib.contextmanager
def wrong_reductions():
    """In here, all gradients are 1 % too large."""
    originals = {}
    with (
        instrument.patch_reduce_scatter(functools.partial(one_percent_more, originals, "reduce_scatter")) as scatter,
        instrument.patch_all_reduce(functools.partial(one_percent_more, originals, "all_reduce")) as reduce,
    ):
        originals |= {"reduce_scatter": scatter, "all_reduce": reduce}
        yield


def main(config):
    with rank.session() as here:
        for cell in [*cells(config.fsdp)[:: config.every], *controls(config.fsdp)]:
            wrong = cell.pop("wrong", False)
            with (
                mock.patch.object(here, "finish_check") as verdict,
                wrong_reductions() if wrong else contextlib.nullcontext(),
            ):
                fsdp_matrix.run_session(fsdp_matrix.Config(check="parity", steps=2, **cell), here)
            here.print_on_rank_0(json.dumps(cell | {"wrong": wrong} | verdict.call_args.kwargs))


if __name__ == "__main__":
    rank.run_main(main, Config)
