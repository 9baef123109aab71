"""Right and wrong answers to the halo exercises, judged in one launch by the check's own program.

Every rank prints one JSON object: what that program says of each answer on this rank, "" where it finds nothing wrong.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from labkit import rank
from labkit.checks import halo_ranks

TRADE = """
    to_left, to_right = {left}.contiguous(), {right}.contiguous()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    handles = []
    if rank > 0:
        handles += [dist.isend(to_left, rank - 1), dist.irecv(from_left, rank - 1)]
    if rank < ranks - 1:
        handles += [dist.isend(to_right, rank + 1), dist.irecv(from_right, rank + 1)]
    for handle in handles:
        handle.wait()
"""
OUT = TRADE.format(left="strip[..., :halo]", right="strip[..., -halo:]")
HOME = TRADE.format(left="grad[..., :halo]", right="grad[..., -halo:]")
EXCHANGE = "def exchange_halo(strip, halo, rank, ranks):"
RETURN = "def return_gradients(grad, halo, rank, ranks):"
GATHER = """
    everyone = [torch.zeros_like({0}) for _ in range(ranks)]
    dist.all_gather(everyone, {0})
"""

# Answers, and for each rank a part of what its learner is told; "" where that rank sees nothing wrong.
ANSWERS = {
    "right": (EXCHANGE + OUT + "    return torch.cat([from_left, strip, from_right], dim=-1)", [""] * 4),
    "right_blocking": (
        EXCHANGE
        + """
    left, right = torch.zeros(2, *strip[..., :halo].shape)
    for first in (0, 1):
        if rank % 2 == first:
            if rank < ranks - 1:
                dist.send(strip[..., -halo:].contiguous(), rank + 1)
                dist.recv(right, rank + 1)
        elif rank > 0:
            dist.recv(left, rank - 1)
            dist.send(strip[..., :halo].contiguous(), rank - 1)
    return torch.cat([left, strip, right], dim=-1)
""",
        [""] * 4,
    ),
    "zeros_instead_of_neighbours": (
        EXCHANGE + "\n    return torch.nn.functional.pad(strip, (halo, halo))",
        ["Wrong: the last 3 columns are all zero"] + ["Wrong: the first 3 columns are all zero"] * 3,
    ),
    "left_and_right_swapped": (
        EXCHANGE + OUT + "    return torch.cat([from_right, strip, from_left], dim=-1)",
        ["Wrong: the first 3 columns are wrong"] * 3 + ["Wrong: the first 3 columns are all zero"],
    ),
    "inner_columns_sent": (
        EXCHANGE
        + TRADE.format(left="strip[..., halo : 2 * halo]", right="strip[..., -halo:]")
        + "    return torch.cat([from_left, strip, from_right], dim=-1)",
        ["Wrong: the last 3 columns are wrong"] * 3 + [""],
    ),
    "whole_image_gathered": (
        EXCHANGE
        + GATHER.format("strip")
        + """
    image = torch.nn.functional.pad(torch.cat(everyone, dim=-1), (halo, halo))
    return image[..., rank * strip.shape[-1] : (rank + 1) * strip.shape[-1] + 2 * halo]
""",
        [f"Wrong: the numbers are right, but this rank handed over 960 bytes; its halos are {n} bytes"
         for n in (360, 720, 720, 360)],
    ),
    "shape_of_the_strip": (
        EXCHANGE + OUT + "    return strip",
        ["Wrong: the shape is (2, 3, 5, 8), expected (2, 3, 5, 14)"] * 4,
    ),
    "one_side_only": (
        EXCHANGE + OUT + "    return torch.cat([from_left, strip], dim=-1)",
        ["Wrong: the shape is (2, 3, 5, 11), expected (2, 3, 5, 14)"] * 4,
    ),
    "nothing_returned": (EXCHANGE + OUT, ["Wrong: the function returned NoneType, not a tensor"] * 4),
    "strip_changed": (
        EXCHANGE + OUT + "    return torch.cat([from_left, 2 * strip, from_right], dim=-1)",
        ["Wrong: the columns between are wrong"] * 4,
    ),
    "not_contiguous": (
        EXCHANGE + (OUT + "    return strip").replace(".contiguous()", ""),
        ["contiguous"] * 4,
    ),
    "gradients_right": (
        RETURN + HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo] += from_left
    own[..., -halo:] += from_right
    return own
""",
        [""] * 4,
    ),
    "gradients_kept": (
        RETURN + "\n    return grad[..., halo:-halo]",
        ["Wrong: the last 3 columns are wrong"] + ["Wrong: the first 3 columns are wrong"] * 3,
    ),
    "gradients_replaced": (
        RETURN + HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo], own[..., -halo:] = from_left, from_right
    return own
""",
        ["Wrong: the first 3 columns are all zero"] + ["Wrong: the first 3 columns are wrong"] * 3,
    ),
    "gradients_swapped": (
        RETURN + HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo] += from_right
    own[..., -halo:] += from_left
    return own
""",
        ["Wrong: the first 3 columns are wrong"] * 4,
    ),
    "gradients_of_the_padded_strip": (
        RETURN + HOME + "    return grad",
        ["Wrong: the shape is (2, 3, 5, 14), expected (2, 3, 5, 8)"] * 4,
    ),
    "gradients_gathered": (
        RETURN + GATHER.format("grad") + """
    own = grad[..., halo:-halo].clone()
    if rank > 0:
        own[..., :halo] += everyone[rank - 1][..., -halo:]
    if rank < ranks - 1:
        own[..., -halo:] += everyone[rank + 1][..., :halo]
    return own
""",
        ["Wrong: the numbers are right, but this rank handed over 1680 bytes"] * 4,
    ),
}  # fmt: skip


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    with rank.session() as here, tempfile.TemporaryDirectory() as folder:

        @contextlib.contextmanager
        def session() -> Iterator[rank.Here]:
            yield here

        halo_ranks.rank.session = session  # one session for all answers
        print(json.dumps({name: judge(Path(folder) / f"{name}.py", text) for name, (text, _) in ANSWERS.items()}))


def judge(file: Path, text: str) -> str:
    file.write_text(text)
    forward = text.startswith(EXCHANGE)
    name, what = ("exchange_halo", "forward") if forward else ("return_gradients", "backward")
    try:
        halo_ranks.main(halo_ranks.Config(answer=str(file), name=name, what=what))
    except Exception as error:
        dist.barrier()  # the others stand at the barrier of halo_ranks.main
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    rank.start(main, Config)
