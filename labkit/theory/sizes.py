"""How many: even shares, shards as DTensor cuts them, the axes of a mesh, and bytes in words. No
torch.
"""

import math


def even_share(total: int, ranks: int, what: str = "a size of") -> int:
    """How many of ``total`` each rank gets. Raises ValueError, with the arithmetic, where that is
    no whole number.
    """
    if total % ranks:
        raise ValueError(
            f"{ranks} ranks cannot share {what} {total}: {total} % {ranks} = {total % ranks}"
        )
    return total // ranks


def shard_sizes(size: int, ranks: int, *, multiple: int = 1) -> list[int]:
    """The local sizes of a dimension cut over ranks as DTensor's Shard cuts it: ceil(size / ranks)
    each, then the rest.

    Args:
        size: the whole dimension, such as an image's width in pixels.
        ranks: how many share it.
        multiple: of which every local size is one: the network's total stride, so that no window
            crosses a cut.

    Raises:
        ValueError: a rank would get nothing, or a size that is not such a multiple; the message
            shows the arithmetic.
    """
    if size < 1 or ranks < 1:
        raise ValueError(f"cannot cut a size of {size} over {ranks} ranks: both must be at least 1")
    chunk = -(-size // ranks)
    sizes = [min(chunk, max(0, size - index * chunk)) for index in range(ranks)]
    if not sizes[-1]:
        raise ValueError(
            f"{ranks} ranks cannot share {size}: ceil({size} / {ranks}) = {chunk} leaves the last"
            " ones nothing"
        )
    for local in (sizes[0], sizes[-1]):
        if local % multiple:
            raise ValueError(
                f"{ranks} ranks cannot share {size}: a rank gets {local}, {local} % {multiple} ="
                f" {local % multiple}; with a total stride of {multiple} take a multiple of {ranks}"
                f" x {multiple} = {ranks * multiple}"
            )
    return sizes


def parse_mesh_axes(text: str, world_size: int) -> dict[str, int]:
    """A mesh's axes from text: ``"4"`` is {space: 4}, ``"2x2"`` is {data: 2, space: 2}, "" is one
    axis over all ranks.

    Raises:
        ValueError: text of another form, or lengths that do not multiply to the number of ranks.
    """
    parts = text.split("x") if text else [str(world_size)]
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"mesh {text!r} is neither one number of ranks, such as 4, nor data x space, such"
            " as 2x2"
        )
    lengths = [int(part) for part in parts]
    if math.prod(lengths) != world_size:
        raise ValueError(
            f"mesh {text} is for {math.prod(lengths)} ranks, but {world_size} are launched: make"
            " them equal"
        )
    return dict(zip(("data", "space")[-len(lengths) :], lengths, strict=True))


def byte_unit(largest: float, *, base: int = 1000) -> tuple[str, int]:
    """The unit in which amounts up to so many bytes read best, and how many bytes it has.

    With ``base`` 1000 that is kB, MB or GB; with 1024, for sizes that are round in it, KiB, MiB or
    GiB.
    """
    names = ("GB", "MB", "kB") if base == 1000 else ("GiB", "MiB", "KiB")
    sizes = (base**3, base**2, base)
    return next(
        ((name, size) for name, size in zip(names, sizes, strict=True) if abs(largest) >= size),
        ("bytes", 1),
    )


def readable_bytes(count: float, *, base: int = 1000) -> str:
    """Bytes in the unit that reads best, three digits or a whole number: 1536 is ``1.54 kB`` or
    ``1.5 KiB``.
    """
    unit, size = byte_unit(count, base=base)
    amount = count / size
    return f"{amount:.3g} {unit}" if abs(amount) < 999.5 else f"{amount:.0f} {unit}"
