"""The course without a clone: a wheel, an empty folder, and an environment with labkit from the wheel alone."""

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

import nbformat
import psutil
import pytest
from fixture_notebooks import read_small_values, unused
from fixture_server import wait_for_info

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(300)]
SMALL = read_small_values("00_ranks")
PACKAGES = ("labkit", "labkit_course", "labkit_simulate", "labkit_cluster", "launch", "notebooks")


@pytest.fixture(scope="module")
def installed(repository, tmp_path_factory):
    """The Python of an environment with this checkout's wheel, and the packages of this one but labkit."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*PACKAGES, "tests"):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "DESCRIPTION.md", "LICENSE", "MANIFEST.in", "Makefile"):
        shutil.copy(repository / name, source)
    make = ["make", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed", "dist"]
    subprocess.run(make, cwd=source, check=True, timeout=200, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=100)
    python = folder / "env" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    install = [*pip, "install", "--no-deps", "--no-index", "--target", packages, wheel]
    subprocess.run(install, check=True, timeout=100, capture_output=True)
    # A path in a .pth is not searched for more of them, so this checkout's editable install stays out.
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def empty(installed, tmp_path, monkeypatch):
    """An empty folder to work in, and nothing of this session's in the environment."""
    for name in ("PYTHONPATH", "LABKIT_RUNS", "LABKIT_VERDICTS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("config", "data", "runtime"):
        monkeypatch.setenv(f"JUPYTER_{name.upper()}_DIR", str(tmp_path / "jupyter" / name))
    # JupyterLab's own files lie in the environment that it was installed into.
    monkeypatch.setenv("JUPYTERLAB_DIR", str(Path(sys.prefix, "share", "jupyter", "lab")))
    folder = tmp_path / "empty folder"
    folder.mkdir()
    return folder


def labkit(python, folder, *words):
    done = subprocess.run([python, "-m", "labkit", *words], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_programs_and_learners_notebooks_and_nothing_else(installed):
    packages = next(installed.parents[1].glob("lib/python*/site-packages"))
    names = {path.name for path in (packages / "notebooks").iterdir()}
    assert "00_ranks.ipynb" in names and all(name.endswith(".ipynb") for name in names)
    assert (packages / "launch" / "fsdp_wrap.py").exists()
    for_clusters = {"slurm.sh", "kubernetes.yaml", "general.sbatch", "train.py", "traffic.py"}
    assert {path.name for path in (packages / "launch" / "cluster").glob("*.*")} == for_clusters
    assert (packages / "labkit_course" / "recorded" / "words.json").exists()
    assert (packages / "labkit_course" / "recorded" / "runs.zip").exists()
    assert {"tests", "benchmarks", "book"}.isdisjoint(path.name for path in packages.iterdir())


def test_the_wheel_describes_itself_and_its_types_are_read(installed):
    packages = next(installed.parents[1].glob("lib/python*/site-packages"))
    (about,) = metadata.distributions(name="labkit", path=[str(packages)])
    text = about.metadata.get_payload()
    assert "# labkit" in text and "labkit lab" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == [], "an index cannot follow links into the repository"
    assert about.metadata["License-Expression"] == "BSD-3-Clause" and "LICENSE" in about.metadata.get_all(
        "License-File"
    )
    assert all((packages / name / "py.typed").exists() for name in PACKAGES if name.startswith("labkit"))


def test_the_sdist_holds_what_the_wheel_is_made_of_and_no_tests(installed):
    (sdist,) = (installed.parents[2] / "source" / "dist").glob("labkit-*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 2}
    assert tops == {*PACKAGES, "labkit.egg-info"}


def test_a_program_runs_and_is_recorded_in_the_current_folder(installed, empty):
    answer = labkit(installed, empty, "run", "fsdp_wrap", "--nproc", "2", "--steps", "1", "--hidden", "8")
    (run,) = (empty / "runs").iterdir()
    assert f"recorded in {run}" in answer
    info = json.loads((run / "run.json").read_text())
    assert Path(info["program_path"]).is_relative_to(installed.parents[1]), "not this checkout's"
    assert info["git_revision"] is None


def test_jupyterlab_opens_on_copies_alone_and_stops_on_request(installed, empty, tmp_path):
    settings = tmp_path / "jupyter" / "config" / "jupyter_server_config.py"
    settings.parent.mkdir(parents=True)
    settings.write_text("c.ServerApp.ip = '0.0.0.0'\n")
    log = tmp_path / "log"
    with log.open("w") as output:
        words = [installed, "-m", "labkit", "lab", "--no-browser", "--jupyter-options=--port=0"]
        server = subprocess.Popen(words, cwd=empty, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        told = tmp_path / "jupyter" / "runtime" / f"jpserver-{server.pid}.json"
        info = wait_for_info(server, told.parent, log)
        process = psutil.Process(server.pid)
        listening = {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}, "whatever the settings say"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(info | {"token": "guessed"}, "api/contents")
        assert info["token"] not in " ".join(process.cmdline()) and told.stat().st_mode & 0o077 == 0
        copies = json.loads(get(info, "api/contents"))["content"]
        labs = [path.name for path in (empty / "my").glob("[0-9]*")]
        assert sorted(each["name"] for each in copies) == sorted([*labs, "AGENTS.md"])
        assert len(labs) >= 7, "each lab, and no solved notebook, source or hidden file"
        page = get(info, "lab/tree/00_ranks.ipynb")
        assert '"disabledExtensions": ["@jupyterlab/apputils-extension:announcements"]' in page
        assert '"can_install": false' in page, "no index is asked for extensions"
        assert f"lab/tree/00_ranks.ipynb?token={info['token']}" in log.read_text(), "the first lab opens by itself"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)
    kept = {path.name for path in (tmp_path / "jupyter" / "config").rglob("*")}
    assert kept <= {"migrated", settings.name}, "nobody's settings were changed"


def get(info, place):
    with urllib.request.urlopen(f"{info['url']}{place}?token={info['token']}", timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.long  # whole, in an environment of its own
def test_a_learners_notebook_runs_through_there_and_its_verdicts_are_kept(installed, empty):
    labkit(installed, empty, "reset", "0")
    copy = empty / "my" / "00_ranks.ipynb"
    notebook = nbformat.read(copy, as_version=4)
    answer = next(cell for cell in notebook.cells if cell.id == "answer-step_seconds")
    right = "return compute_s / ranks + 2 * (ranks - 1) * (latency_s + gradient_bytes / ranks / bytes_per_s)"
    answer.source = answer.source.replace("...  # your code here", right)
    notebook.cells.append(nbformat.v4.new_code_cell("import labkit; print(labkit.__file__)"))
    nbformat.write(notebook, copy)
    code = "import papermill, sys; papermill.execute_notebook(sys.argv[1], sys.argv[1], eval(sys.argv[2]))"
    command = [installed, "-c", code, copy, repr(SMALL)]
    ended = subprocess.run(command, cwd=copy.parent, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = nbformat.read(copy, as_version=4)
    printed = done.cells[-1].outputs[0].text
    assert printed.startswith(str(installed.parents[1])), printed
    standing = done.cells[-2].outputs[0].data["text/plain"]
    assert standing.startswith("1 of 5 passed, these are open: 0.1 mend the circle; ")
    assert "00_ranks                  1 of 5 passed" in labkit(installed, empty, "progress")
    assert unused(SMALL, empty / "runs") == [], "beside the copies, not among them"
    assert {path.name for path in copy.parent.iterdir()} == {".labkit", copy.name, "progress.json"}
    assert "00_ranks: nothing new" in labkit(installed, empty, "update")
