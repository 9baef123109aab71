"""labkit.hidden_modules: a learner's torch.py or random.py is named, whatever it breaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit import hidden_modules

FIX = "hides the module of that name: rename it, or take its folder off PYTHONPATH"
SMALL = Path(__file__).parent / "programs" / "small.py"


def test_a_folder_on_the_path_is_searched_up_to_pythons_own(tmp_path):
    for name in ("random.py", "torch.py", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "numpy").mkdir()
    told = f"{tmp_path}/random.py, {tmp_path}/torch.py {FIX}"
    assert hidden_modules.hiding_files(["/nowhere", str(tmp_path)]) == told
    assert hidden_modules.hiding_files([hidden_modules.PYTHONS_OWN_FOLDER, str(tmp_path)]) == ""
    assert hidden_modules.hiding_files(sys.path) == ""


@pytest.mark.parametrize("name", ["torch", "random"])
def test_a_run_that_a_file_on_pythonpath_breaks_names_it(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(labkit.RankFailed) as caught:
        labkit.run(SMALL, nproc=1, warm=False)
    assert f"{tmp_path}/{name}.py {FIX}" in caught.value.message


@pytest.mark.parametrize(("name", "says"), [("torch", "hidden by {}/torch.py"), ("random", f"{{}}/random.py {FIX}")])
def test_a_command_in_the_folder_of_such_a_file_names_it(tmp_path, name, says):
    (tmp_path / f"{name}.py").touch()
    root = str(Path(labkit.__file__).parents[1])
    command, env = [sys.executable, "-m", "labkit", "doctor"], os.environ | {"PYTHONPATH": root}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert answer.returncode == 1 and says.format(tmp_path) in answer.stdout + answer.stderr
