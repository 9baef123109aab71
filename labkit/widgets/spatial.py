"""What cutting a ConvNeXt's images pays and costs: activations against a budget, halos and all-reduces: lab 1."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from matplotlib.figure import Figure

import labkit
from labkit.models import photo
from labkit.plots import spatial as plots
from labkit.plots import style
from labkit.runs.result import RunResult
from labkit.theory import spatial as theory
from labkit.theory.sizes import even_share, readable_bytes
from labkit.widgets.explorer import Control, Explorer

HEIGHT, DEPTHS, HALO = 64, (1, 1), 3
"""Of the images, in pixels; blocks in each stage; columns that a 7 × 7 convolution needs of a neighbour."""


class SpatialExplorer(Explorer):
    """Lab 1's network, one block in each of two stages, on images that are 64 pixels high."""

    title = "Do the activations fit, and what does cutting send?"
    controls: ClassVar = {
        "mesh": Control(
            "ranks, data × space",
            {"1 × 1": (1, 1), "1 × 2": (1, 2), "1 × 4": (1, 4), "2 × 1": (2, 1), "2 × 2": (2, 2)},
            (1, 2),
        ),
        "tensor_dim": Control("cut along space", {"width": 3, "height": 2}, 3),
        "width": Control("width, pixels", (128, 256, 512), 256),
        "batch": Control("images", (2, 4, 8), 4),
        "dims": Control(
            "channels", {"16, 32": (16, 32), "32, 64": (32, 64), "64, 128": (64, 128)}, (32, 64)
        ),
        "budget": Control("budget, MB", (2, 4, 8, 16), 8, only_drawn=True),
    }
    formulas = (
        theory.convnext_activation_bytes,
        theory.spatial_send_bytes,
        theory.spatial_all_reduces,
    )
    tolerances: ClassVar = {"peak_activation_bytes": 0.05}

    def predict(self, **chosen: Any) -> dict[str, float]:
        (data, space), dims = chosen["mesh"], chosen["dims"]
        size = (HEIGHT, chosen["width"])[chosen["tensor_dim"] - 2]
        theory.check_strips(size, space, DEPTHS)
        batch, neighbours = even_share(chosen["batch"], data, "a batch of"), min(space - 1, 2)
        network: dict[str, Any] = {
            "depths": DEPTHS,
            "dims": dims,
            "num_classes": 10,
            "batch": batch,
        }
        count, handed = theory.spatial_all_reduces(
            strategy="local", space_ranks=space, data_ranks=data, **network
        )
        stages = theory.convnext_stages(HEIGHT, chosen["width"], DEPTHS, dims)
        sent = theory.spatial_send_bytes(
            stages=stages, batch=batch, neighbours=neighbours, tensor_dim=chosen["tensor_dim"]
        )
        messages = {"send_count": 2 * neighbours * sum(DEPTHS), "send_bytes": sent}
        sums = {"all_reduce_count": count, "all_reduce_bytes": handed}
        found = {name: value for name, value in (messages | sums).items() if value}
        return {"peak_activation_bytes": _activation_bytes(**chosen), **found}

    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        (data, space), budget = chosen["mesh"], chosen["budget"] * 1e6
        strips, memory, traffic = (figure.add_axes(place) for place in PANEL_BOUNDS)
        rows = 512 * HEIGHT // chosen["width"]
        eyes = photo.load_photo()[
            200 - rows // 2 : 200 + rows // 2
        ]  # as wide and high as the images
        halo = HALO * theory.total_stride(DEPTHS)
        part = halo / (HEIGHT, chosen["width"])[chosen["tensor_dim"] - 2]
        plots.strip_layout(
            eyes, chosen["mesh"], chosen["batch"], part, tensor_dim=chosen["tensor_dim"], ax=strips
        )
        if space > 1:
            text = f"shaded: the halo in the last stage,\n{HALO} of its pixels, {halo} of the image"
            figure.text(0.01, 0.05, text, fontsize=9)
        held = predicted["peak_activation_bytes"]
        alone = _activation_bytes(**chosen | {"mesh": (1, 1)})
        found = {name: result.value(name) for name in predicted} if result else {}
        colours = {
            "activations": style.MEMORY_CATEGORIES["activations"][1],
            "halos": style.ORANGE,
            "sums": style.PURPLE,
        }
        bars: dict[str, dict[str, float]] = {
            "1 rank": {"activations": alone},
            "a rank": {"activations": held},
        }
        seen = {"a rank": {"activations": found["peak_activation_bytes"]}} if found else {}
        plots.byte_bars(bars, seen, colours, budget=budget, ylabel="activations", ax=memory)
        plots.byte_bars(
            _traffic_bars(predicted),
            _traffic_bars(found) if found else {},
            colours,
            ylabel="handed over",
            ax=traffic,
        )
        fits = "within" if held <= budget else "over"
        halos = readable_bytes(predicted.get("send_bytes", 0))
        sums = readable_bytes(predicted.get("all_reduce_bytes", 0))
        return (
            f"on {data} × {space} ranks a rank keeps {readable_bytes(held)} of activations, {fits} the budget of "
            f"{chosen['budget']} MB, and one rank alone {readable_bytes(alone)}; it hands over {halos} for halos and "
            f"{sums} to all-reduces"
        )

    def launch(self, **chosen: Any) -> RunResult:
        data, space = chosen["mesh"]
        how: dict[str, Any] = (
            {"strategy": "local", "mesh": f"{data}x{space}"} if data * space > 1 else {}
        )
        same = {name: chosen[name] for name in ("tensor_dim", "width", "batch", "dims")}
        how = {"strategy": "plain"} | how | same
        return labkit.run(
            "convnext_spatial",
            nproc=math.prod(chosen["mesh"]),
            height=HEIGHT,
            depths=DEPTHS,
            steps=1,
            **how,
        )


PANEL_BOUNDS = ((0.01, 0.14, 0.41, 0.8), (0.5, 0.17, 0.17, 0.68), (0.82, 0.17, 0.17, 0.68))
"""Of the three panels, as parts of the figure: left, bottom, width, height."""


def _activation_bytes(**chosen: Any) -> int:
    """Bytes of a rank."""
    (data, space), dim = chosen["mesh"], chosen["tensor_dim"]
    sides = [HEIGHT, chosen["width"]]
    sides[dim - 2] //= space
    stages = theory.convnext_stages(sides[0], sides[1], DEPTHS, chosen["dims"])
    return theory.convnext_activation_bytes(
        stages=stages, batch=chosen["batch"] // data, ranks=space, tensor_dim=dim
    )


def _traffic_bars(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Bytes by what they are handed over for, as bars."""
    return {
        "halos": {"halos": values.get("send_bytes", 0)},
        "all-\nreduces": {"sums": values.get("all_reduce_bytes", 0)},
    }
