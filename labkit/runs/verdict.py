"""Say what a check found, from the verdict that rank 0 writes and run.json keeps."""

import math
from collections.abc import Mapping
from typing import Any

from labkit.runs.folder import RunFolder, read_json

# How a run ends whose ranks all left in order; "differs" if its check found a difference.
FINISHED_EXITS = ("ok", "differs")


def finished_exit(folder: RunFolder) -> str:
    """Return the exit of a run whose ranks all left in order."""
    return "ok" if read_json(folder.verdict_json).get("ok", True) else "differs"


def describe_verdict(verdict: Mapping[str, Any]) -> str:
    """Return what was compared and whether it agrees; "" for no verdict."""
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
    """Return the largest error of a check beside its limit, in digits; "" if it has neither."""
    if not {"max_rel_error", "limit"} <= verdict.keys():
        return ""
    return f"largest relative error {verdict['max_rel_error']:.2g}, tolerance {verdict['limit']:g}"


def _differences(verdict: Mapping[str, Any]) -> list[str]:
    # A verdict of a check of one's own may lack any number, so each is looked up with a default.
    error, found = verdict.get("max_rel_error", 0.0), []
    # Written so that NaN differs, too.
    if not error <= verdict.get("limit", math.inf):
        worst = verdict.get("worst") or "an unnamed one"
        found.append(f"they differ, most in {worst}, by {_magnitude_text(error)}")
    if verdict.get("wrong"):
        found.append(f"{verdict['wrong']:,} of rank 0's differ")
    if not verdict["compared"] > 0:
        found.append("nothing was compared")
    elif verdict["compared"] != verdict.get("expected", verdict["compared"]):
        found.append(f"{verdict['expected']:,} were to be compared")
    if not verdict.get("gradients_alive", True):
        found.append("a gradient of the reference is zero or missing, so it proves nothing")
    return found


# An order of magnitude is the same on every machine.
def _magnitude_text(error: float) -> str:
    if not math.isfinite(error):
        return f"{error}"
    return f"more than {100 * 10.0 ** math.floor(math.log10(error)):g} %"
