"""Results recorded on another machine, for a room without enough cores: LABKIT_RECORDED=1.

They are runs of the labs, with all records and logs, and are stamped "recorded" wherever their
numbers are shown. ``notebooks/tools/record_runs.py`` packs them.
"""

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import config
from labkit.environment import ENV_RECORDED
from labkit.launcher.run import RunRequest, make_run_name
from labkit.runs import private_files
from labkit.runs.folder import runs_folder
from labkit.runs.result import RunResult, load
from labkit.theory.emulated import read_emulated

ARCHIVE = Path(__file__).with_name("recorded") / "runs.zip"


def request_key(info: Mapping[str, Any]) -> str:
    """Return what a request and the run.json of its result have in common, as text."""
    hardware = info["emulate"]
    emulated = read_emulated(hardware) if isinstance(hardware, dict) else hardware
    wanted = [info["program"], info["nproc"], info["params"], repr(emulated)]
    return json.dumps(wanted, sort_keys=True, default=str)


def find_recorded(request: RunRequest) -> RunResult | None:
    """Return the recorded result of a request, or None; say either, so that nobody takes one for
    the other.

    Its files are copied into the folder of runs, where they are like those of any run.
    """
    title = f"{request.program}, {request.nproc} ranks"
    name = "" if _needs_this_machine(request) else _recorded_name(request)
    if not name:
        print(f"{title}: measured here, since no recorded result has these arguments")
        return None
    folder = runs_folder() / make_run_name(request.program)
    private_files.make_private_folder(folder.parent)
    folder.mkdir(mode=private_files.FOLDER_MODE)
    with zipfile.ZipFile(ARCHIVE) as archive:
        for each in archive.namelist():
            if each.startswith(f"{name}/"):
                with archive.open(each) as source, (folder / Path(each).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    result = load(folder)
    print(f"{title}: not measured here ({ENV_RECORDED}=1), but {result.session['note']}")
    return result


def _needs_this_machine(request: RunRequest) -> bool:
    """Return whether a run is of the caller's own program or functions, on hosts, or on GPUs."""
    is_own = request.target != f"launch.{request.program}"
    return bool(is_own or request.use or request.hosts or request.device == "cuda")


def _recorded_name(request: RunRequest) -> str:
    """Return the folder of the recorded run with these arguments in the archive, or ""."""
    asked = {name: getattr(request, name) for name in ("program", "nproc", "params", "emulate")}
    program, nproc, params, emulate = json.loads(request_key(asked))
    config_class = config.read_config(Path(request.program_path))
    fields = config.init_fields(config_class) if config_class else {}
    defaults = {name: config.default_value(field) for name, field in fields.items()}
    defaults = json.loads(json.dumps(defaults, default=str))
    with zipfile.ZipFile(ARCHIVE) as archive:
        names: dict[str, str] = json.loads(archive.read("names.json"))
    for key, name in names.items():
        known = json.loads(key)
        # An option that the program has got since had the value that is now its default.
        if [program, nproc, params, emulate] == [*known[:2], defaults | known[2], known[3]]:
            return name
    return ""
