"""The code that a lab shows as what you would write runs as a file of its own, under bare torchrun, without labkit."""

import os
import re
import subprocess
import sys

import pytest

from notebooks.tools.build import FOLDER
from notebooks.tools.source import find_labs, solved_notebook

SCRIPT = "script"
"""Tag of such a cell."""
ALWAYS = ("01_spatial_sharding",)
"""Labs whose scripts are run by every ``make test``; each takes some seconds, in most of which torch is imported."""
GLOO = "terminate called without an active exception"
"""What is said when Python ends around gloo's threads, now and then, after the script has done all it has to do."""


def scripts():
    """Each by its lab and place: ranks, and the cell's text below the magic."""
    for lab in find_labs(FOLDER):
        if f'"{SCRIPT}"' not in lab.source.read_text():
            continue  # it takes a while to read one
        for number, cell in enumerate(solved_notebook(lab.source).cells):
            if SCRIPT in cell.metadata.get("tags", []):
                magic, text = cell.source.split("\n", 1)
                ranks = re.fullmatch(r"%%torchrun -n (\d+).*", magic)
                if not ranks:  # then it is a plain cell, which torchrun's ranks know as theirs
                    text = cell.source
                    assert "if dist.is_torchelastic_launched():" in text, f"{lab.name}, cell {number} runs nowhere"
                needed = int(ranks[1]) if ranks and "init_device_mesh" in text else 2  # each imports torch anew
                marks = () if lab.name in ALWAYS else pytest.mark.long  # they run in the notebook, too
                yield pytest.param(needed, text, id=f"{lab.name}, cell {number}", marks=marks)


@pytest.mark.parametrize(("ranks", "text"), list(scripts()))
def test_what_you_would_write_runs_under_bare_torchrun(ranks, text, tmp_path):
    assert "labkit" not in text
    (tmp_path / "labkit.py").write_text("raise ImportError('a script of its own needs no labkit')\n")
    (tmp_path / "script.py").write_text(text)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "script.py"]
    for _ in range(2):
        with_folder = os.environ | {"TMPDIR": str(temporary)}
        done = subprocess.run(command, cwd=tmp_path, env=with_folder, capture_output=True, text=True, timeout=100)
        if GLOO not in done.stderr:
            break
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torch")]
    assert not left, "what a script saves is gone with it; the folders of torchrun and the compiler are torch's"
    assert len(text.strip().splitlines()) <= 40, "a page"
