"""Does a distributed run compute what one device computes?

``training`` compares tensors and counts them; ``one_device`` is the reference, which plays all
ranks in turn; ``states`` compares models and state dicts rank by rank and shard by shard. What one
lab compares is in the module with that lab's name.
"""

from labkit.parity.comparison import LIMITS, Parity, relative_error, seed_and_copy, seed_parameters
from labkit.parity.one_device import OneDevice, draw_samples, make_sgd, sample_seed
from labkit.parity.states import (
    assert_module_states,
    broadcast_state_dict,
    check_sharded_parity,
    copy_state_dict,
    full_params,
    zero_model,
)

__all__ = ["LIMITS", "OneDevice", "Parity", "draw_samples", "make_sgd", "relative_error"]
__all__ += ["assert_module_states", "sample_seed", "seed_and_copy", "seed_parameters"]
__all__ += ["broadcast_state_dict", "check_sharded_parity", "copy_state_dict", "full_params"]
__all__ += ["zero_model"]
