"""Explorers: turn a knob and see what theory says at once; press a button and real ranks confirm it.

No maths here: ``theory`` computes, ``plots`` draws, ``launcher`` runs. See explorer.py for what all of them share.
"""

from labkit.widgets.buckets import BucketExplorer
from labkit.widgets.gather import GatherExplorer
from labkit.widgets.placement import PlacementExplorer
from labkit.widgets.spatial import SpatialExplorer
from labkit.widgets.two_axes import TwoAxesExplorer
from labkit.widgets.wrapping import WrappingExplorer

__all__ = ["BucketExplorer", "GatherExplorer", "PlacementExplorer", "SpatialExplorer", "TwoAxesExplorer", "WrappingExplorer"]
