"""What a check has found, in words: which rank 0's session leaves in verdict.json, and run.json
keeps.
"""

import math
from collections.abc import Mapping
from typing import Any

from labkit.runs.folder import RunFolder, read_json

FINISHED_EXITS = ("ok", "differs")
"""What run.json says of a run that came to its end: "differs" where its check found a
difference.
"""


def finished_exit(folder: RunFolder) -> str:
    """What run.json is to say of a run whose ranks all left in order."""
    return "ok" if read_json(folder.verdict_json).get("ok", True) else "differs"


def describe_verdict(verdict: Mapping[str, Any]) -> str:
    """What was compared and whether it agrees; "" for no verdict.

    Errors are named by their order of magnitude, so that the same check says the same on every
    machine.
    """
    if not verdict:
        return ""
    compared, thing = verdict["compared"], "tensors" if "max_rel_error" in verdict else "values"
    if verdict.get("check") == "parity":
        what = f"{compared:,} {thing} compared with {verdict.get('reference', 'one device')}"
    else:
        what = f"{verdict.get('check', 'check')}: {compared:,} {thing} compared"
    if verdict["ok"]:
        limit = verdict.get("limit", 0)
        return f"{what}: all equal" + (f", to 1 part in {1 / limit:,.0f}" if limit else "")
    return f"{what}: {', '.join(_differences(verdict)) or 'they differ'}"


def describe_error(verdict: Mapping[str, Any]) -> str:
    """The largest error of a check beside what it allows, in digits; "" for one that has no such
    numbers.
    """
    if not {"max_rel_error", "limit"} <= verdict.keys():
        return ""
    return f"largest relative error {verdict['max_rel_error']:.2g}, tolerance {verdict['limit']:g}"


def _differences(verdict: Mapping[str, Any]) -> list[str]:
    """Why a verdict is not ok, as far as its numbers tell."""
    error, found = verdict.get("max_rel_error", 0.0), []
    if not error <= verdict.get("limit", math.inf):
        found.append(
            f"they differ, most in {verdict.get('worst') or 'an unnamed one'}, by"
            f" {_magnitude(error)}"
        )
    if verdict.get("wrong"):
        found.append(f"{verdict['wrong']:,} of rank 0's differ")
    if not verdict["compared"] > 0:
        found.append("nothing was compared")
    elif verdict["compared"] != verdict.get("expected", verdict["compared"]):
        found.append(f"{verdict['expected']:,} were to be compared")
    if not verdict.get("gradients_alive", True):
        found.append("a gradient of the reference is zero or missing, so it proves nothing")
    return found


def _magnitude(error: float) -> str:
    return (
        f"more than {100 * 10.0 ** math.floor(math.log10(error)):g} %"
        if math.isfinite(error)
        else f"{error}"
    )
