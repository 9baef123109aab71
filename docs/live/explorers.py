"""Answer a page: which controls an explorer has, and its figure, sentence and numbers for chosen values.

Values travel as JSON: a control's value is the place of an option in its list or, where any value may be typed in, a
number. ``python -m docs.live.explorers`` writes the first answers, and with ``--all`` those for every position of the
controls, for a book whose pages have no Python; names of explorers after that choose some.
"""

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from docs.live import figure, stand_ins

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "RingExplorer": "ring",
    "StepExplorer": "step_time",
    "TwoAxesExplorer": "two_axes",
    "HostsExplorer": "hosts",
}
# Where theory and figure take any number, not those of the buttons alone: from, to, and whether it is a whole one.
ANY_NUMBER: dict[tuple[str, str], tuple[float, float, bool]] = {
    ("RingExplorer", "messages"): (1, 10_000, True),
    ("RingExplorer", "latency_us"): (0.1, 10_000, False),
    ("RingExplorer", "gb_per_s"): (0.1, 10_000, False),
    ("StepExplorer", "latency_us"): (0, 10_000, False),
    ("TwoAxesExplorer", "card_gb_per_s"): (0.1, 1000, False),
    ("HostsExplorer", "tokens"): (1, 1_000_000, True),
}


def find(name: str) -> Any:
    """Return a new explorer, imported where the stand-ins are."""
    module = importlib.import_module(f"labkit_course.widgets.{MODULES[name]}")
    return getattr(module, name)()


def describe(name: str) -> dict[str, Any]:
    """Return an explorer's title and its controls, with the place of the default."""
    explorer = find(name)
    controls = []
    for key, control in explorer.controls.items():
        values = [value for _, value in control.options]
        described = {
            "key": key,
            "label": control.label,
            "options": [text for text, _ in control.options],
        }
        described["chosen"] = values.index(control.default)
        if (name, key) in ANY_NUMBER:
            low, high, whole = ANY_NUMBER[name, key]
            described["any"] = {"min": low, "max": high, "whole": whole, "values": values}
        controls.append(described)
    return {"name": name, "title": explorer.title, "controls": controls}


def answer(name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return figure, sentence and numbers of an explorer, or what theory says against the values.

    ``chosen`` are, by control, the place of an option, or {"number": …}.
    """
    explorer, values = find(name), {}
    for key, control in explorer.controls.items():
        given = chosen[key]
        if isinstance(given, dict):
            low, high, whole = ANY_NUMBER[name, key]
            value = given["number"]
            if value is None or not low <= value <= high or (whole and value != int(value)):
                kind = "a whole number" if whole else "a number"
                return {"error": f"{control.label}: take {kind} from {low:,} to {high:,}"}
            values[key] = int(value) if whole else value
        else:
            values[key] = control.options[given][1]
    try:
        predicted = explorer.predict(**values)
        drawn = figure.Figure(explorer.size)
        words = explorer.draw(drawn, predicted, None, **values)
    except ValueError as error:
        return {"error": str(error)}
    rows = [[each, next(iter(explorer.table_row(each, value, None).values()))] for each, value in predicted.items()]
    return {"svg": drawn.svg(words), "words": f"{words}.", "rows": rows, "numbers": predicted}


def defaults(name: str) -> dict[str, Any]:
    """Return the place of each control's default."""
    return {control["key"]: control["chosen"] for control in describe(name)["controls"]}


def positions(name: str) -> dict[str, dict[str, Any]]:
    """Return the answers for all options of all controls, by their places, such as "1,0,2"."""
    controls = describe(name)["controls"]
    keys = [control["key"] for control in controls]
    places = itertools.product(*(range(len(control["options"])) for control in controls))
    return {",".join(map(str, each)): answer(name, dict(zip(keys, each, strict=True))) for each in places}


def main() -> None:
    """Write as JSON what the book needs of each explorer."""
    stand_ins.install(ROOT)
    found: dict[str, Any] = {}
    for name in [each for each in sys.argv[1:] if each != "--all"] or MODULES:
        found[name] = describe(name) | {"first": answer(name, defaults(name))}
        if "--all" in sys.argv:
            found[name]["positions"] = positions(name)
    loaded = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    files = sorted(path.relative_to(ROOT).as_posix() for path in loaded if path.is_relative_to(ROOT))
    json.dump({name: explorer | {"files": files} for name, explorer in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
