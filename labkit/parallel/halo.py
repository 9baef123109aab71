"""Convolve an image that is cut into strips, one strip per rank.

Legend: N images, C channels, H height, W width; ``dim`` is the cut dimension, 2 or 3. Comments show
the shapes of a cut width.

A convolution with overlapping windows needs a few columns from the neighbour at each border of its
strip: the halo. Every rank sends its outermost columns to both neighbours, receives theirs, and
then convolves as if alone:

    rank 0  | a b c d |         rank 0  | 0 a b c d E |     0: zero padding at the image's border
    rank 1  | e f g h |    ->   rank 1  | D e f g h 0 |     D, E: the neighbour's columns

In the backward pass the gradients of D and E return to their owners, who add them to their own.
This is the adjoint of the exchange, so the result equals that of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from labkit.parallel.small_tensor_parallel import sum_over_ranks


@dataclass
class Strip:
    """A rank's place in the line of ranks that share an image."""

    dim: int  # the cut dimension of [N, C, H, W], 2 or 3
    group: dist.ProcessGroup | None  # the ranks of the line, or None for a line of one
    rank: int  # this rank's index in the line
    ranks: int  # length of the line
    share: float = 1.0  # this rank's part of the image, 1 / ranks if all strips are equal
    # Replaces pad_with_halo; it must be differentiable.
    pad: Callable[[Tensor, int, Strip], Tensor] | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, mesh_dim: int, dim: int) -> Strip:
        """Return this rank's strip of an image that is cut along one axis of a mesh."""
        ranks = mesh.size(mesh_dim)
        return cls(dim, mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), ranks, 1 / ranks)


def pad_with_halo(x: Tensor, halo: int, strip: Strip) -> Tensor:
    """Add the neighbours' columns at both ends of a strip, and zeros at the image's borders."""
    dim, size = strip.dim, x.shape[strip.dim]
    first, last = x.narrow(dim, 0, halo), x.narrow(dim, size - halo, halo)
    wait = _exchange_with_neighbours(first, last, strip)
    shape = list(x.shape)
    # [N, C, H, W + 2 * halo]
    shape[dim] = size + 2 * halo
    layout = image_memory_format(x)
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    # Copied while the halos travel.
    padded.narrow(dim, halo, size).copy_(x)
    for start, arrived in zip((0, size + halo), wait(), strict=True):
        padded.narrow(dim, start, halo).copy_(arrived)
    return padded


def return_halo_gradients(grad_padded: Tensor, halo: int, strip: Strip) -> Callable[[], Tensor]:
    """Start to send a halo's gradients to the owners of its columns: ``pad_with_halo``'s adjoint.

    Return a function that waits, and returns the strip's gradient with the neighbours' parts added.
    """
    dim, size = strip.dim, grad_padded.shape[strip.dim] - 2 * halo
    own = grad_padded.narrow(dim, halo, size)
    first, last = grad_padded.narrow(dim, 0, halo), grad_padded.narrow(dim, size + halo, halo)
    wait = _exchange_with_neighbours(first, last, strip)

    def wait_and_add() -> Tensor:
        for start, arrived in zip((0, size - halo), wait(), strict=True):
            own.narrow(dim, start, halo).add_(arrived)
        return own

    return wait_and_add


def _exchange_with_neighbours(
    first: Tensor, last: Tensor, strip: Strip
) -> Callable[[], list[Tensor]]:
    """Start to send ``first`` to the rank before and ``last`` to the rank after.

    Return a function that waits, and returns what both sent; zeros at a border of the image.
    """
    outbox = [first.contiguous(), last.contiguous()]
    inbox = [torch.zeros_like(outgoing) for outgoing in outbox]
    calls: list[dist.P2POp] = []
    for outgoing, incoming, peer in zip(
        outbox, inbox, (strip.rank - 1, strip.rank + 1), strict=True
    ):
        if 0 <= peer < strip.ranks:
            calls.append(dist.P2POp(dist.isend, outgoing, group=strip.group, group_peer=peer))
            calls.append(dist.P2POp(dist.irecv, incoming, group=strip.group, group_peer=peer))
    # One batch, because NCCL could deadlock if two ranks both send before they receive.
    works = dist.batch_isend_irecv(calls) if calls else []

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        # Until now they have kept the contiguous copies alive.
        calls.clear()
        outbox.clear()
        return inbox

    return wait


def image_memory_format(x: Tensor) -> torch.memory_format:
    """Return channels_last if the images [N, C, H, W] are stored so, else contiguous."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def halo_size(conv: nn.Conv2d, dim: int) -> int:
    """Return the columns (rows if dim is 2) that a rank needs from each neighbour, or 0."""
    axis = dim - 2
    kernel, stride, dilation = conv.kernel_size[axis], conv.stride[axis], conv.dilation[axis]
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        unfit = f"padding {conv.padding!r} with mode {conv.padding_mode!r}"
        raise ValueError(f"{unfit} cannot be sharded: use a number and zeros")
    padding, reach = conv.padding[axis], dilation * (kernel - 1)
    # Output columns equal input columns, and windows reach ``padding`` columns beyond.
    if stride == 1 and 2 * padding == reach:
        return padding
    # Windows lie side by side, as in a patch embedding.
    if stride == kernel and padding == 0 and dilation == 1:
        return 0
    raise ValueError(
        f"kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation} along dim {dim}"
        f" cannot be sharded: either stride 1 with 2 x padding = dilation x (kernel - 1) = {reach},"
        " or stride = kernel without padding"
    )


class HaloConv2d(nn.Module):
    """Convolves a strip as if the whole image were on this rank, with a Conv2d's weight and bias.

    A collective: every rank of the line must call it, forward and backward, in the same order. The
    gradients of weight and bias are this rank's terms of a sum, as each sees only its strip.
    """

    def __init__(self, conv: nn.Conv2d, halo: int, strip: Strip):
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.halo, self.strip = halo, strip
        # halo_size refuses text, such as "same".
        assert isinstance(conv.padding, tuple)
        # The halo takes the place of the padding along the cut dimension.
        padding = [0 if axis == strip.dim - 2 else size for axis, size in enumerate(conv.padding)]
        self.settings = (conv.stride, tuple(padding), conv.dilation, conv.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Map a strip [N, C, H, W], plain or DTensor, to the output's strip of the same kind."""
        if isinstance(x, DTensor):
            return call_on_strip(self.forward, x)
        halo, strip, size = self.halo, self.strip, x.shape[self.strip.dim]
        # A neighbour would need columns from the rank beyond this one.
        if halo > size:
            raise ValueError(
                f"rank {strip.rank} of {strip.ranks} holds {size} along dim {strip.dim}, less than"
                f" the halo of {halo}: use fewer ranks or a larger image"
            )
        weight, bias = _local_term(self.weight), _local_term(self.bias)
        if not halo:
            return torch.conv2d(x, weight, bias, *self.settings)
        if strip.pad:
            return torch.conv2d(strip.pad(x, halo, strip), weight, bias, *self.settings)
        out: Tensor = _HaloConv2d.apply(x, weight, bias, halo, strip, self.settings)
        return out


def call_on_strip(function: Callable[[Tensor], Tensor], x: DTensor) -> DTensor:
    """Apply a function to the plain local strip of a DTensor."""
    return DTensor.from_local(function(x.to_local()), x.device_mesh, x.placements)


def _local_term(parameter: Tensor | None) -> Any:
    """Return a replicated parameter's local tensor, whose gradient is one rank's term of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


class _HaloConv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, halo: int, strip: Strip, how: Any
    ) -> Tensor:
        # [N, C, H, W + 2 * halo]
        padded = pad_with_halo(x, halo, strip)
        ctx.save_for_backward(padded, weight)
        ctx.halo, ctx.strip, ctx.settings = halo, strip, how
        return torch.conv2d(padded, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        stride, padding, dilation, groups = ctx.settings
        transposed, output_padding, bias_sizes = False, [0, 0], [len(weight)]
        settings = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)

        def convolution_gradients(*wanted: bool) -> list[Any]:
            backward = torch.ops.aten.convolution_backward
            return backward(grad_out, padded, weight, *settings, wanted)

        grad_padded = convolution_gradients(wants_x, False, False)[0]
        wait = return_halo_gradients(grad_padded, ctx.halo, ctx.strip) if wants_x else None
        # Computed while the gradients of the halos travel.
        grad_weight = convolution_gradients(False, wants_weight, False)[1]
        # On a CPU the sum is far faster than the convolution's own gradient of the bias.
        grad_bias = grad_out.sum(dim=(0, 2, 3)) if wants_bias else None
        grad_x = wait() if wait else None
        return grad_x, grad_weight, grad_bias, None, None, None


def pad_columns(strip: Tensor, halo: int, rank: int, ranks: int) -> Tensor:
    """Return a strip [N, C, H, W] with ``halo`` columns of each neighbour, zeros at the border."""
    return pad_with_halo(strip, halo, Strip(3, None, rank, ranks))


def swap_columns(to_left: Tensor, to_right: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Send columns to both neighbours; return those of the left and the right, zeros at a border.

    All four have one shape. Every rank of the default group calls it.
    """
    from_left, from_right = _exchange_with_neighbours(
        to_left, to_right, Strip(3, None, rank, ranks)
    )()
    return from_left, from_right


def spatial_mean(x: Tensor, strip: Strip, average: bool = True) -> Tensor:
    """Average the whole image, given a strip [N, C, H, W]: one all-reduce of [N, C].

    ``average`` says that gradients will be averaged over the ranks, rather than added up.
    """
    # [N, C], this strip's term of the sum
    term = x.mean(dim=(2, 3)) * strip.share
    if strip.ranks == 1:
        return term
    # Every rank of the line computes the same loss from this mean, so the gradient of the sum of
    # all losses is ``ranks`` times one rank's. Averaging over ranks divides it again.
    if average and term.requires_grad:
        term.register_hook(lambda grad: grad * strip.ranks)
    assert strip.group is not None
    return sum_over_ranks(term, strip.group)
