"""Cells of the FSDP test bench in one launch: each is compared with one device, and its verdict is printed."""

import contextlib
import functools
import itertools
import json
from dataclasses import dataclass
from unittest import mock

from labkit import instrument, rank
from labkit.models.catalog import MODELS
from launch import fsdp_matrix, fsdp_wrap


@dataclass
class Config:
    """Which part of the grid."""

    cells: tuple[str, ...] = ()
    """Each as JSON."""


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
    {"model": "mlp_stack", "reshard_after_forward": False, "checkpointing": True, "accumulate": 3},
    {"model": "nested", "scaler": True, "precision": "bf16", "accumulate": 2},
]
OWN = {
    1: [
        {"model": "transformer", "use_orig_params": False},
        {"model": "nested", "backward_prefetch": "post"},
        {"model": "nested", "backward_prefetch": "none", "forward_prefetch": True, "limit_all_gathers": False},
    ],
    2: [{"model": "skip", "wrap": "none", "ignore": ("SkipModule",)}, {"model": "transformer", "prefetch": True}],
}


def grid_cells(fsdp):
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
    return [{"fsdp": fsdp, "wrap": "block"} | cell for cell in [*grid, *OPTIONS, *OWN[fsdp]]]


CELLS = [*grid_cells(1), *grid_cells(2)]
# Their gradients are reduced to 1 % too much, which the comparison must see.
CONTROLS = [{"fsdp": fsdp, "wrap": "block", "model": model} for fsdp in (1, 2) for model in MODELS]
CONTROLS += [{"fsdp": 2, "wrap": "none", "model": "toy"}]


def pairs_of(cell):
    """Any two settings of a cell; of a model's only the pair with the version of FSDP."""
    settings = [(name, str(value)) for name, value in cell.items() if name != "min_numbers"]
    pairs = itertools.combinations(sorted(settings), 2)
    return {pair for pair in pairs if "model" not in dict(pair) or "fsdp" in dict(pair)}


def pairwise_sample():
    """A few cells in which any two settings meet that meet in one of all cells; see ``pairs_of``."""
    chosen, missing = [], set().union(*map(pairs_of, CELLS))
    while missing:
        chosen.append(max(CELLS, key=lambda cell: len(missing & pairs_of(cell))))
        missing -= pairs_of(chosen[-1])
    return chosen


def name_of(cell):
    """A cell in one word, such as ``2-toy-block-checkpointing-precision=bf16``: what it sets."""
    words = [str(cell[name]) for name in ("fsdp", "model", "wrap")]
    for name, value in cell.items():
        if name not in ("fsdp", "model", "wrap", "min_numbers") and value != getattr(fsdp_matrix.Config, name):
            words.append(name if value is True else f"{name}={value[0] if isinstance(value, tuple) else value}")
    return "-".join(words)


def steps_of(cell):
    """How many steps of a cell are compared."""
    # a second step in a short type begins with weights that differ, which these two networks enlarge: steps_to_compare
    if cell.get("precision", "fp32") != "fp32" and cell["model"] in ("hf_t5", "transformer"):
        return 1
    # the third is the first with gradients that are zeroed, not dropped
    return 3 if "accumulate" in cell else 2


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
        for text in config.cells:
            wrong, cell = json.loads(text)
            with (
                mock.patch.object(here, "finish_check") as verdict,
                mock.patch.object(fsdp_wrap, "steps_to_compare", lambda steps, dtype: steps),
                wrong_reductions() if wrong else contextlib.nullcontext(),
            ):
                fsdp_matrix.run_session(fsdp_matrix.Config(check="parity", steps=steps_of(cell), **cell), here)
            here.print_on_rank_0(json.dumps(verdict.call_args.kwargs))


if __name__ == "__main__":
    rank.run_main(main, Config)
