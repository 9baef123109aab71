"""JupyterLab on the learner's copies alone, without touching anybody's Jupyter settings.

What is special here lies in the hidden folder of the copies: a configuration that switches the
announcements off (a question at the first start, and news from the network afterwards), and the
layout of the windows, so that nothing opens that another project left open. The learner's own
settings, such as the theme, hold as everywhere.
"""

import json
import os
import sys
from pathlib import Path

from labkit.environment import ENV_RUNS_FOLDER
from labkit.errors import LabError
from labkit.runs import private_files
from labkit.runs.folder import LABKIT_FOLDER_NAME, runs_folder, write_text

LOOPBACK_ADDRESS = "127.0.0.1"
ANNOUNCEMENTS_PLUGIN = "@jupyterlab/apputils-extension:announcements"


def prepare_environment(folder: Path) -> dict[str, str]:
    """Write the configuration; the environment of a JupyterLab on this folder.

    Raises:
        LabError: the folder is another user's, who could put a configuration there that JupyterLab
            executes.
    """
    try:
        private_files.make_own_folder(folder / LABKIT_FOLDER_NAME)
        private_files.make_own_folder(folder)
    except OSError as error:
        raise LabError(
            f"{error.filename}: {error.strerror}; take another folder with --folder"
        ) from None
    ours = folder / LABKIT_FOLDER_NAME / "jupyter"
    page = ours / "labconfig" / "page_config.json"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, json.dumps({"disabledExtensions": {ANNOUNCEMENTS_PLUGIN: True}}) + "\n")
    config_path = filter(None, [str(ours), os.environ.get("JUPYTER_CONFIG_PATH")])
    return {
        **os.environ,
        "JUPYTER_CONFIG_PATH": os.pathsep.join(config_path),
        "JUPYTERLAB_WORKSPACES_DIR": str(ours / "workspaces"),
        ENV_RUNS_FOLDER: str(
            runs_folder()
        ),  # a kernel works in the folder of copies, and its runs do not belong there
    }


def jupyter_command(
    folder: Path, notebook: str, *, browser: bool, more: tuple[str, ...] = ()
) -> list[str]:
    """What starts JupyterLab; ``more`` are options of its own."""
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"),
        f"--LabApp.default_url=/lab/tree/{notebook}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",  # the other one asks an index for extensions
        *([] if browser else ["--no-browser"]),
        # Whatever a person's settings say, it listens to this machine alone, unless asked for more
        # here. It wants its token, which stands in a file that is this person's alone, and on no
        # command line.
        *(
            []
            if {"--ip", "--ServerApp.ip"} & {each.split("=")[0] for each in more}
            else [f"--ServerApp.ip={LOOPBACK_ADDRESS}"]
        ),
        *(["--allow-root"] if os.geteuid() == 0 else []),  # in a container one is root
        *more,
    ]


def exec_jupyter(folder: Path, notebook: str, *, browser: bool, more: tuple[str, ...] = ()) -> None:
    """Become JupyterLab: this process ends with it, and Ctrl-C and signals are its own.

    Raises:
        LabError: there is no JupyterLab.
    """
    import importlib.util

    if importlib.util.find_spec("jupyterlab") is None:
        raise LabError(f"no JupyterLab in {sys.prefix}: pip install 'labkit[notebook]'")
    environment = prepare_environment(folder)
    sys.stdout.flush()
    words = jupyter_command(folder, notebook, browser=browser, more=more)
    os.execve(words[0], words, environment)
