"""Let small real models run at the pace of large ones on hardware of the data sheets.

labkit.run("decoder", nproc=8, emulate="h100-8x")
labkit.run("decoder", nproc=8, emulate=slow_motion("a100-8x", model="llama_3_8b", slower=20))
"""

from labkit.errors import ParameterError
from labkit.theory.emulated import Emulated
from labkit_simulate.theory import transformer
from labkit_simulate.theory.hardware import get_hardware

MODELS = {
    "llama_2_7b": transformer.LLAMA_2_7B,
    "llama_2_13b": transformer.LLAMA_2_13B,
    "llama_3_8b": transformer.LLAMA_3_8B,
    "llama_3_70b": transformer.LLAMA_3_70B,
}
BFLOAT16_BYTES = 2


def slow_motion(
    hardware: str, *, model: str = "llama_2_7b", tokens: int = 2048, slower: float = 10.0
) -> Emulated:
    """Return a GPU host on which each unit takes as long as a block of a large model.

    Collectives take the times of ``labkit.theory.links``, as in a simulation for that hardware, and
    arithmetic that of ``matmul_share``.

    Args:
        hardware: such as "h100-8x", see ``theory.hardware.HARDWARE``.
        model: whose blocks the program's units stand for.
        tokens: of a rank in a step.
        slower: how many times longer everything takes than on the hardware.

    Raises:
        ParameterError: hardware or model is unknown; the message lists the known ones.
    """
    if model not in MODELS:
        raise ParameterError(f"model {model!r} is none of {', '.join(MODELS)}")
    try:
        kind = get_hardware(hardware)
        rate = kind.matmul_share * kind.peak_flops_per_s("bfloat16")
    except ValueError as error:
        raise ParameterError(f"emulate = {hardware!r}: {error}") from None
    shape = MODELS[model]
    # Each weight is multiplied and added once per token; attention adds its scores and values.
    flops = 2 * tokens * (sum(shape.matmul_weights) + 2 * tokens * shape.width)
    return Emulated(
        latency_us=slower * kind.inside.alpha_s * 1e6,
        gb_per_s=1e-9 / (slower * kind.inside.beta_s_per_byte),
        ranks_per_host=kind.devices,
        between_latency_us=slower * kind.between.alpha_s * 1e6,
        between_gb_per_s=1e-9 / (slower * kind.between.beta_s_per_byte),
        forward_ms=slower * flops / rate * 1e3,
        unit_bytes=BFLOAT16_BYTES * shape.block_parameters,
        links=hardware,
        hardware=kind.device,
        slower=slower,
    )
