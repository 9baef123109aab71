"""Pack the labs' runs for rooms without enough cores: ``python -m notebooks.tools.record_runs RUNS``.

RUNS is the folder in which solved labs have just left their runs (LABKIT_RUNS), executed on a quiet machine. Of each
request the last undisturbed run is kept, unless it was of a learner's functions, failed, or was on GPUs or hosts.
"""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.runs.folder import ROOT
from labkit.runs.result import RunResult, load
from labkit.runs.verdict import FINISHED_EXITS
from labkit_course.recorded_runs import ARCHIVE, request_key

# Whatever else is there was for processes that have ended, or is a copy of what the records say.
KEPT_ENDINGS = (".jsonl", ".log", ".txt", ".gave.pt")
MAX_BYTES = 1_000_000


def can_be_recorded(result: RunResult) -> bool:
    """Tell whether anybody who asks for the same may get this result."""
    info = result.info
    is_ours = info.get("target", "") in ("", f"launch.{info['program']}") and not info.get("use")
    is_plain = not (info.get("hosts") or result.is_simulated or (result.folder / "given.pickle").exists())
    ended_well = info["exit"] in FINISHED_EXITS and info.get("session") and not result.cores_of_others
    is_launched = (ROOT / "launch" / f"{info['program']}.py").is_file()
    return bool(is_ours and is_plain and ended_well and is_launched and result.device in ("cpu", "emulated"))


def without_paths(info: dict[str, Any]) -> dict[str, Any]:
    """Return the run.json as it is recorded: stamped, and without the places of one machine."""
    session = info["session"]
    note = f"recorded on {info['start'][:10]} with {session['cores']} cores"
    session = session | {"note": " · ".join(filter(None, [session.get("note"), note]))}
    return info | {"program_path": f"launch/{info['program']}.py", "session": session, "recorded": True}


def pack(runs: Path, archive_path: Path) -> int:
    """Write the archive of all runs in a folder that can be recorded; return their number."""
    chosen: dict[str, RunResult] = {}
    for folder in sorted(path.parent for path in runs.glob("*/run.json")):
        try:
            result = load(folder)
        except LabError:
            continue  # of an experiment that broke a run on purpose
        if can_be_recorded(result):
            chosen[request_key(result.info)] = result
    names: dict[str, str] = {}
    with zipfile.ZipFile(archive_path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, (key, result) in enumerate(sorted(chosen.items())):
            names[key] = name = f"{number:03d}-{result.info['program']}"
            archive.writestr(f"{name}/run.json", json.dumps(without_paths(result.info)))
            for path in sorted(result.folder.iterdir()):
                if path.name.startswith("rank_") and path.name.endswith(KEPT_ENDINGS):
                    text = path.read_bytes().replace(str(ROOT).encode(), b".") if path.suffix != ".pt" else None
                    archive.writestr(f"{name}/{path.name}", path.read_bytes() if text is None else text)
        archive.writestr("names.json", json.dumps(names, indent=1))
    return len(names)


def main() -> int:
    """Pack the runs of the folder that the command line names."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    count = pack(Path(sys.argv[1]), ARCHIVE)
    size = ARCHIVE.stat().st_size
    print(f"{count} runs, {size:,} bytes in {ARCHIVE}")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
