"""Does a distributed run compute what one device computes?

``training`` compares tensors and counts them; ``one_device``, the reference, plays all ranks in turn; ``states`` holds
models and state dicts against each other, rank by rank and shard by shard. What a lab has to compare is in the module
that has the lab's name.
"""

from labkit.parity.one_device import OneDevice, optimizer_of, samples_and_seed, seed_of
from labkit.parity.states import (
    assert_module_states,
    broadcast_state_dict,
    check_sharded_parity,
    full_params,
    state_dict_of,
    zero_model,
)
from labkit.parity.training import LIMITS, Parity, relative_error, seed_parameters, seeded_copy

__all__ = [
    "LIMITS",
    "OneDevice",
    "Parity",
    "assert_module_states",
    "broadcast_state_dict",
    "check_sharded_parity",
    "full_params",
    "optimizer_of",
    "relative_error",
    "samples_and_seed",
    "seed_of",
    "seed_parameters",
    "seeded_copy",
    "state_dict_of",
    "zero_model",
]
