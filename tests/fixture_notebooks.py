"""What the tests that run a learner's notebook share, wherever they run it."""

import json


def unused(values, runs):
    """Those of a notebook's parameters that no run was asked for."""
    infos = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    asked = [{"ranks": info["nproc"]} | info["params"] for info in infos]
    return [name for name, value in values.items() if value not in [each.get(name.lower()) for each in asked]]
