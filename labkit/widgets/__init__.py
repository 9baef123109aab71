"""Explorers: turn a knob and see what theory says at once; press a button and real ranks confirm it.

No maths here: ``theory`` computes, ``plots`` draws, ``launcher`` runs. See explorer.py for what all of them share.
"""

from labkit.widgets.buckets import Buckets
from labkit.widgets.gather import Gather
from labkit.widgets.placement import Placement
from labkit.widgets.spatial import Spatial
from labkit.widgets.two_axes import TwoAxes
from labkit.widgets.wrapping import Wrapping

__all__ = ["Buckets", "Gather", "Placement", "Spatial", "TwoAxes", "Wrapping"]
