"""Every rank trains on its part of the image by itself, and nothing is exchanged: the bound of what sharding can give.

The same work for each rank as in ``convnext_spatial --strategy local --preset bench``, at the same time.
"""

from dataclasses import dataclass

from labkit import rank
from labkit.config import PositiveInt
from labkit.models import photo
from launch import convnext_spatial as lab


@dataclass
class Config:
    """How long."""

    steps: PositiveInt = 10
    """Timed steps, after one to warm up."""


def main(config: Config) -> None:
    """Train and measure."""
    with rank.session() as here:
        whole = lab.Config(**lab.Config.PRESETS["bench"] | {"steps": config.steps})
        model = lab.build_model(whole, here.device)
        width = whole.width // here.world_size
        images, labels = photo.image_batch(whole.data, whole.batch, whole.height, width, whole.num_classes, whole.seed)
        lab.train(whole, here.steps, model, images.to(here.device), labels.to(here.device))


if __name__ == "__main__":
    rank.run_main(main, Config)
