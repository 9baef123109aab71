"""Compares ConvNeXt with one device while no halo arrives: every border of a strip sees zeros."""

from __future__ import annotations

import torch

from labkit.parallel import halo
from launch import convnext_spatial


def nothing_arrives(first, last, strip):
    return lambda: [torch.zeros_like(first), torch.zeros_like(last)]


if __name__ == "__main__":
    halo._exchange_with_neighbours = nothing_arrives
    convnext_spatial.main(convnext_spatial.Config(check="parity"))
