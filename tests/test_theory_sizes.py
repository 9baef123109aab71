"""labkit.theory.sizes: bytes in words. Shares and shards: test_theory_spatial, where they are used."""

import pytest

from labkit.theory.sizes import byte_unit, readable_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (-1000, "-1 kB"),
        (1536, "1.54 kB"),
        (999_900, "1000 kB"),
        (4_000_000, "4 MB"),
        (121.4e6, "121 MB"),
        (2.5e9, "2.5 GB"),
        (2500e9, "2500 GB"),
    ],
)
def test_bytes_are_read_in_powers_of_1000(count, text):
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(1000, "1000 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1023 * 1024, "1023 KiB"), (4 * 2**20, "4 MiB")],
)
def test_and_of_1024_where_sizes_are_round_in_it(count, text):
    assert readable_bytes(count, base=1024) == text


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, ("bytes", 1)), (5e3, ("kB", 1000)), (999_999, ("kB", 1000)), (3e10, ("GB", 10**9))]
)
def test_the_unit_of_an_axis_is_that_of_its_largest_amount(largest, unit):
    assert byte_unit(largest) == unit
