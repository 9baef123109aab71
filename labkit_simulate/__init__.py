"""The same programs as one rank of many, without the others and without numbers.

    result = labkit.simulate("fsdp_wrap", world_size=1024, model="mlp_stack", dim=4096)

A simulated rank runs its program line by line, in a process of its own, on torch's fake process group, which sends
nothing, and on fake tensors, which have a shape, a type and a size but no memory. So it says exactly what the program
holds and hands to collectives, for as many ranks as one likes, and nothing about values. How long its step takes is
reckoned from what it did, for a hardware of one's choice.

``start`` starts it, ``world`` is what it finds itself in, ``watched`` looks at programs that do not measure themselves,
``reckoned`` reckons time, ``links`` says over which links messages go, ``blocks`` whose the memory is, and ``fits``
whether it fits. ``plan`` asks for many, ``search`` simulates them side by side, ``continued`` spares most of a deep
model's blocks, ``candidates`` is what came of it.
"""

from labkit_simulate.run_simulation import simulate

__all__ = ["simulate"]
