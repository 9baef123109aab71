"""Does a distributed run compute what one device computes?

``training`` compares tensors and counts them; ``one_device`` plays all ranks in turn, as the reference for sharded
training; ``states`` holds models and state dicts against each other, rank by rank and shard by shard.
"""

from labkit.parity.one_device import OneDevice, compare_training, optimizer_of, samples_and_seed
from labkit.parity.states import (
    assert_module_states,
    broadcast_state_dict,
    check_sharded_parity,
    full_params,
    state_dict_of,
    zero_model,
)
from labkit.parity.training import (
    Parity,
    of_training_step,
    relative_error,
    seed_parameters,
    seeded_copy,
    whole,
)

__all__ = [
    "OneDevice", "Parity", "assert_module_states", "broadcast_state_dict", "check_sharded_parity", "compare_training",
    "full_params", "of_training_step", "optimizer_of", "relative_error", "samples_and_seed", "seed_parameters",
    "seeded_copy", "state_dict_of", "whole", "zero_model",
]  # fmt: skip
