"""Run a learner's test of a halo exchange on a right exchange and on broken ones."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.halo import Strip, pad_columns, return_halo_gradients, swap_columns
from labkit_course.checks.judge import WrongAnswer

# Ranks whose tests run as one end within milliseconds of each other.
PATIENCE_S = 10.0
RIGHT = "is right"

# From (strip or gradient of the padded strip, halo, rank, ranks).
Columns = Callable[[Tensor, int, int, int], Tensor]


def run_answer(answer: Callable[..., Any]) -> dict[str, Any]:
    """Call the learner's test with each exchange; return what it ``said``, by the exchange's words.

    That is True, False, or the name of another type. A test that raises has failed, as in pytest;
    with the right exchange only an AssertionError counts, because others are the test's own.
    """
    index, ranks = dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    said: dict[str, bool | str] = {}
    right = (RIGHT, RIGHT_EXCHANGE)
    # Once more at the end, for a test that remembers its earlier calls.
    for words, exchange in (right, *BROKEN_EXCHANGES.items(), right):
        try:
            found = answer(exchange.differentiable(), index, ranks)
        except Exception as error:
            if words == RIGHT and not isinstance(error, AssertionError):
                raise
            found = False
        if isinstance(found, Tensor) and found.numel() == 1:
            found = bool(found)
        if said.get(words, True) is True:
            said[words] = found if isinstance(found, bool) else type(found).__name__
        # What one rank sends in this test must not arrive in another's next one.
        if not _have_all_returned(everyone):
            early = f"the test returned on rank {index} while another rank waited"
            given = f"{early}, with an exchange that {words}"
            raise WrongAnswer(f"{given}: go forward and backward on each rank, then compare")
    return {"said": said}


def _have_all_returned(everyone: Any) -> bool:
    try:
        dist.barrier(everyone)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class Exchange:
    """The two directions of a halo exchange, and a hint for a test that a broken one passes."""

    pad: Columns
    send_home: Columns
    hint: str = ""

    def differentiable(self) -> Callable[..., Tensor]:
        """Return the exchange as one operation that autograd can differentiate."""
        pad, send_home = self.pad, self.send_home

        class HaloExchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, strip: Tensor, *place: int) -> Tensor:
                ctx.place = place
                return pad(strip, *place)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                return send_home(grads[0], *ctx.place), None, None, None

        apply: Callable[..., Tensor] = HaloExchange.apply
        return apply


def add_at_home(grad: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send the halo's gradients to the columns' owners, who add them: right."""
    return return_halo_gradients(grad.clone(), halo, Strip(3, None, rank, ranks))()


def repeat_own_columns(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send nothing; an image of ones hides it."""
    first, last = strip[..., :halo], strip[..., -halo:]
    ends = first if rank else 0 * first, last if rank < ranks - 1 else 0 * last
    return torch.cat([ends[0], strip, ends[1]], dim=-1)


def swap_halos(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Put the left neighbour's columns on the right, and the other way round."""
    padded = pad_columns(strip, halo, rank, ranks)
    return torch.cat([padded[..., -halo:], strip, padded[..., :halo]], dim=-1)


def repeat_at_the_border(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Repeat columns at the right border; only the last rank is wrong."""
    padded = pad_columns(strip, halo, rank, ranks)
    if rank == ranks - 1:
        padded[..., -halo:] = strip[..., -halo:]
    return padded


def share_the_first_halo(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Give every image the first one's halo."""
    padded = pad_columns(strip, halo, rank, ranks)
    for columns in (slice(halo), slice(-halo, None)):
        padded[..., columns] = padded[:1, ..., columns].clone()
    return padded


def round_the_halo(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send the halo in bfloat16."""
    padded = pad_columns(strip, halo, rank, ranks)
    for columns in (slice(halo), slice(-halo, None)):
        padded[..., columns] = padded[..., columns].bfloat16().to(strip.dtype)
    return padded


def keep_no_halo(grad: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send no gradient home."""
    return grad[..., halo:-halo].clone()


def send_own_columns_home(grad: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Send the gradients of the strip's outer columns, not the halo's; equal gradients hide it."""
    own = grad[..., halo:-halo].clone()
    sent = own[..., :halo].clone(), own[..., -halo:].clone()
    from_left, from_right = swap_columns(*sent, rank, ranks)
    own[..., :halo] += from_left
    own[..., -halo:] += from_right
    return own


RIGHT_EXCHANGE = Exchange(pad_columns, add_at_home)
# By words that go on after "one that".
BROKEN_EXCHANGES = {
    "sends nothing, and repeats a strip's own columns": Exchange(
        repeat_own_columns,
        keep_no_halo,
        "Compare the padded strip with the same columns of the whole image; all must differ.",
    ),
    "swaps the left and the right halo": Exchange(
        swap_halos, add_at_home, "Compare the padded strip, too, and not gradients alone."
    ),
    "repeats columns at the right border, where zeros belong": Exchange(
        repeat_at_the_border, add_at_home, "Only the last rank is wrong: let each rank compare."
    ),
    "gives every image the halo of the first": Exchange(
        share_the_first_halo, add_at_home, "Take several images, all different."
    ),
    "rounds the halo to bfloat16": Exchange(
        round_the_halo,
        add_at_home,
        "Draw random numbers, and allow for no more than the rounding of float32.",
    ),
    "sends no gradient home": Exchange(
        pad_columns, keep_no_halo, "Compare the gradient of the strip, too."
    ),
    "sends home the gradients of the wrong columns": Exchange(
        pad_columns,
        send_own_columns_home,
        "The gradient that you pass to backward must differ from column to column.",
    ),
}
