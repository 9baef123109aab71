"""Simulate one rank of many, without the other ranks and without numbers.

    result = labkit.simulate("fsdp_wrap", world_size=1024, model="mlp_stack", dim=4096)

A simulated rank runs its program line by line in a process of its own, on torch's fake process
group, which sends nothing, and on fake tensors, which have a shape, a type and a size but no
memory. So the memory and the communication are exact for any number of ranks, and values are
unknown. The time of a step is estimated from the recorded events, for a hardware of your choice.

``run_simulation`` starts a simulation and ``run_rank`` is its process, where ``patch_*`` replace
what a fake process group lacks. ``external_program`` records programs that do not measure
themselves. ``estimate`` gives the step time, ``link_traffic`` the links that messages cross,
``block_memory`` the memory by block, ``memory_fit`` whether it fits. ``planner`` searches
candidates, ``simulate_many`` simulates them side by side, ``extrapolate`` saves most blocks of a
deep model, and ``search_result`` holds the outcome. ``decoder`` is the model that is planned for.
"""

from labkit_simulate.run_simulation import simulate

__all__ = ["simulate"]
