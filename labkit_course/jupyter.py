"""Start JupyterLab on the learner's copies, without changing anyone's Jupyter settings.

The hidden folder of the copies holds a configuration that switches announcements off (a question at
the first start, later news from the network), and the layout of the windows, so that no documents
of another project open. The learner's own settings, such as the theme, still apply.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

from labkit.environment import ENV_RUNS_FOLDER
from labkit.errors import LabError
from labkit.requirements import LOOPBACK
from labkit.runs import private_files
from labkit.runs.folder import LABKIT_FOLDER_NAME, explain_write_errors, runs_folder, write_text

ANNOUNCEMENTS_PLUGIN = "@jupyterlab/apputils-extension:announcements"


def prepare_environment(folder: Path) -> dict[str, str]:
    """Write the configuration, and return the environment for a JupyterLab on this folder."""
    # JupyterLab executes its configuration, so no other user may be able to write one there.
    ours = folder / LABKIT_FOLDER_NAME / "jupyter"
    for place in (ours.parent, folder):
        with explain_write_errors(place, "take another folder with --folder"):
            private_files.make_own_folder(place)
    page = ours / "labconfig" / "page_config.json"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, json.dumps({"disabledExtensions": {ANNOUNCEMENTS_PLUGIN: True}}) + "\n")
    config_path = filter(None, [str(ours), os.environ.get("JUPYTER_CONFIG_PATH")])
    return {
        **os.environ,
        "JUPYTER_CONFIG_PATH": os.pathsep.join(config_path),
        "JUPYTERLAB_WORKSPACES_DIR": str(ours / "workspaces"),
        # A kernel's current folder is that of the copies, where its runs do not belong.
        ENV_RUNS_FOLDER: str(runs_folder()),
    }


def jupyter_command(
    folder: Path, notebook: str, *, browser: bool, more: tuple[str, ...] = ()
) -> list[str]:
    """Return the command that starts JupyterLab; ``more`` are its own options."""
    names_address = {"--ip", "--ServerApp.ip"} & {each.split("=")[0] for each in more}
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"),
        f"--LabApp.default_url=/lab/tree/{notebook}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        # The default extension manager queries a package index.
        "--LabApp.extension_manager=readonly",
        *([] if browser else ["--no-browser"]),
        # Listen on the loopback interface whatever the person's settings say, unless asked here.
        # The token is in a file that only this person can read, never on the command line.
        *([] if names_address else [f"--ServerApp.ip={LOOPBACK}"]),
        # In a container the user is often root.
        *(["--allow-root"] if os.geteuid() == 0 else []),
        *more,
    ]


def exec_jupyter(folder: Path, notebook: str, *, browser: bool, more: tuple[str, ...] = ()) -> None:
    """Replace this process with JupyterLab, which then receives Ctrl-C and signals."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise LabError(f"no JupyterLab in {sys.prefix}: pip install 'labkit[notebook]'")
    environment = prepare_environment(folder)
    sys.stdout.flush()
    words = jupyter_command(folder, notebook, browser=browser, more=more)
    os.execve(words[0], words, environment)
