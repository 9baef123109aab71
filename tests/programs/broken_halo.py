"""Compares ConvNeXt with one device while no halo arrives: every border of a strip sees zeros."""

from __future__ import annotations

from labkit.parallel import halo
from launch import convnext_spatial


def nothing_arrives(first, last, strip):
    return lambda: [None, None]


if __name__ == "__main__":
    halo._exchange_with_neighbours = nothing_arrives
    convnext_spatial.main(convnext_spatial.Config(check="parity"))
