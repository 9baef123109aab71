"""Divide sizes over ranks, parse a mesh, and print bytes."""

import math
from collections.abc import Sequence


def even_share(total: int, ranks: int, what: str = "a size of") -> int:
    """Return ``total / ranks``, or raise ValueError with the arithmetic if it is not whole."""
    if rest := total % ranks:
        raise ValueError(f"{ranks} ranks cannot share {what} {total}: {total} % {ranks} = {rest}")
    return total // ranks


def shard_elements(shape: Sequence[int], ranks: int) -> int:
    """Return the elements of the largest shard of a parameter: ceil(rows / ranks) rows."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def shard_sizes(size: int, ranks: int, *, multiple: int = 1) -> list[int]:
    """Return the local sizes of a dimension cut as by DTensor's Shard: ceil(size / ranks) each.

    ``multiple`` is the network's total stride: no convolution's window may cross a cut.
    """
    if size < 1 or ranks < 1:
        raise ValueError(f"cannot cut a size of {size} over {ranks} ranks: both must be at least 1")
    chunk = -(-size // ranks)
    sizes = [min(chunk, max(0, size - index * chunk)) for index in range(ranks)]
    cannot = f"{ranks} ranks cannot share {size}"
    if not sizes[-1]:
        raise ValueError(f"{cannot}: ceil({size} / {ranks}) = {chunk} leaves the last ones nothing")
    for local in (sizes[0], sizes[-1]):
        if rest := local % multiple:
            rule = f"a rank gets {local}, {local} % {multiple} = {rest}; with a total stride of"
            fix = f"take a multiple of {ranks} x {multiple} = {ranks * multiple}"
            raise ValueError(f"{cannot}: {rule} {multiple} {fix}")
    return sizes


def parse_mesh_axes(text: str, world_size: int) -> dict[str, int]:
    """Parse a mesh: ``"4"`` is {space: 4}, ``"2x2"`` is {data: 2, space: 2}, "" is all ranks."""
    parts = text.split("x") if text else [str(world_size)]
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        known = "one number of ranks, such as 4, nor data x space, such as 2x2"
        raise ValueError(f"mesh {text!r} is neither {known}")
    lengths = [int(part) for part in parts]
    ranks = math.prod(lengths)
    if ranks != world_size:
        rule = f"mesh {text} is for {ranks} ranks, but {world_size} are launched"
        raise ValueError(f"{rule}: make them equal")
    return dict(zip(("data", "space")[-len(lengths) :], lengths, strict=True))


def byte_unit(largest: float, *, base: int = 1000) -> tuple[str, int]:
    """Return name and bytes of the unit for amounts up to ``largest``: kB … if ``base`` is 1000."""
    names = ("GB", "MB", "kB") if base == 1000 else ("GiB", "MiB", "KiB")
    for name, size in zip(names, (base**3, base**2, base), strict=True):
        if abs(largest) >= size:
            return name, size
    return "bytes", 1


def readable_bytes(count: float, *, base: int = 1000) -> str:
    """Return bytes with three digits or as a whole number, such as ``1.54 kB`` or ``1.5 KiB``."""
    unit, size = byte_unit(count, base=base)
    amount = count / size
    return f"{amount:.3g} {unit}" if abs(amount) < 999.5 else f"{amount:.0f} {unit}"
