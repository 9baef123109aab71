"""Lab 3's experiments: decoding in blocks, and what an emulated step waits for."""

import pytest
import torch

from labkit.tensors import EXTENSIONS
from labkit_course import gather_costs, hook_costs

SHAPES = [(128, 768), *[(512, 128), (128, 512)] * 2, (10, 128)]


@pytest.mark.parametrize("block", [1, 8, 300])
def test_a_decode_in_blocks_fills_the_parameter_and_holds_one_block(block):
    gathered = EXTENSIONS["int8"].encode(torch.randn(60, 16))
    expected = EXTENSIONS["int8"].decode(gathered, torch.float32)
    hook, out = gather_costs.lean_decoder(block), torch.empty(59, 16)
    assert hook(gathered, None, torch.float32, out=out) is None
    assert torch.equal(out, expected[:59])
    whole, freed = hook(gathered, None, torch.float32)
    assert torch.equal(whole, expected) and freed == (whole,)
    # Of each number of a block, its float32 and the product.
    assert hook_costs.own_bytes(hook, torch.bfloat16, (600, 16)) == 8 * block / 600


def test_the_parts_of_an_emulated_step_are_those_that_lab_3_tells():
    variants, expected_ms = gather_costs.wire_cases(SHAPES, 2, lambda shard, rows: None)
    parts = gather_costs.step_parts(expected_ms, variants, SHAPES, 2, emulated=expected_ms)
    assert parts.loc["float32, narrow, hidden"].tolist() == [600, 30, 0, 107, 737, 737]
    assert parts.loc["yours, narrow, exposed"].tolist() == [0, 54, 80, 107, 242, 242]
