"""What another user of the same machine can do to labkit, and what labkit does to them: the promises of SECURITY.md.

The other user is real: a process with another user id. To make one takes root; without it these tests are skipped.
"""

import ast
import ctypes
import fcntl
import functools
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from fixture_processes import wait_for
from fixture_users import NOBODY

import labkit
from labkit import compile_cache
from labkit.environment import ENV_NETWORK, ENV_QUEUE, ENV_RUN_FOLDER
from labkit.errors import LabError, ParameterError, RankFailed
from labkit.launcher import network_namespace, process, run_queue
from labkit.launcher.run_queue import ResourceNeeds
from labkit.runs import folder as folders
from labkit.runs import private_files
from labkit_course import jupyter, verdict_store

ROOT = Path(labkit.__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def home(open_place, monkeypatch):
    """A home of this user's own and a /tmp in which all write; the queue is on."""
    (open_place / "home").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(open_place / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(open_place / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv(ENV_QUEUE)
    return open_place / "home"


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def nine() -> int:
    return 9


def what_works(paths):
    """Which of these files and folders a user may read, write, rename or only see."""
    acts = {"see": os.stat, "rename": lambda path: os.rename(path, f"{path}-mine-now")}
    acts |= {"read": lambda path: os.open(path, os.O_RDONLY), "write": lambda path: os.open(path, os.O_WRONLY)}
    done = []
    for path in paths:
        for name, act in acts.items():
            try:
                act(path)
            except (PermissionError, IsADirectoryError):
                continue
            done.append([path, name])
    return done


@pytest.mark.parametrize("how", [pytest.param("warm", marks=pytest.mark.long), "cold, umask 0"])
def test_nobody_else_reads_a_run(another_user, open_place, monkeypatch, how):
    runs = open_place / "new" / "runs"
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    before = os.umask(0 if "umask" in how else 0o022)
    try:
        with pytest.raises(RankFailed, match="the end"):
            labkit.run(PROGRAMS / "everything.py", device="cpu", warm=how == "warm", use={"number": nine})
    finally:
        os.umask(before)
    (run,) = runs.iterdir()
    files = list(run.iterdir())
    assert {path.name.replace("00001", "00000") for path in files} == {
        *("run.json", "session.json", "exit.json", "given.pickle", "torchrun.log", "rank_00000.jsonl"),
        *(f"rank_00000.{end}" for end in ("log", "pid", "stack", "error.json", "trace.json.gz", "note.txt", "gave.pt")),
    }
    assert labkit.load(run).ranks[1].reported == {"number": 9}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (runs, run)} == {0o700}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: 0o600 for path in files}
    paths = [str(run), *map(str, files)]
    assert another_user.does(what_works, paths) == []
    runs.chmod(0o755)
    run.chmod(0o755)
    expected = [[paths[0], "see"], [paths[0], "read"], *([path, "see"] for path in paths[1:])]
    assert another_user.does(what_works, paths) == expected, "each file is closed by itself as well"


def test_a_run_listens_on_loopback_alone(both_ways):
    result = labkit.run(PROGRAMS / "sockets.py", nproc=3, device="cpu")
    listening = json.loads(result.ranks[0].log())
    assert {address for _, address, _ in listening} == {"127.0.0.1"}
    assert sorted(who for who, _, _ in listening) == ["rank", "rank", "rank", "torchrun"], "the store is torchrun's"
    assert len({port for _, _, port in listening}) == 4


def can_connect(port):
    try:
        with socket.socket() as mine:
            mine.connect(("127.0.0.1", port))
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(("wanted", "answer"), [("own", False), ("", True)])
def test_nobody_connects_to_a_run_in_a_network_of_its_own(another_user, tmp_path, monkeypatch, wanted, answer):
    monkeypatch.setenv(ENV_NETWORK, wanted)
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    how = {"device": "cpu", "until": str(tmp_path / "over")}
    running = threading.Thread(target=labkit.run, args=[PROGRAMS / "sockets.py"], kwargs=how)
    running.start()
    try:
        log = wait_for(lambda: [log for log in tmp_path.glob("*/rank_00000.log") if log.read_text().endswith("\n")])
        own = {each.pid for each in process.find_run_processes(log[0].parent)}
        seen = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        others = {each.laddr.port for each in seen if each.pid not in own}
        for _, address, port in json.loads(log[0].read_text()):
            assert address == "127.0.0.1"
            if port not in others:  # else somebody out here happens to listen at this port, too
                assert another_user.does(can_connect, port) == answer
    finally:
        (tmp_path / "over").touch()
        running.join()


def look_around_in_own_network():
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, which a process without a new program loses with its user
    network_namespace.enter_namespace()
    listening = socket.create_server(("127.0.0.1", 0))
    return os.getuid(), [name for _, name in socket.if_nameindex()], can_connect(listening.getsockname()[1])


def test_users_without_roots_rights_have_networks_of_their_own_too(another_user):
    if not int(Path("/proc/sys/user/max_user_namespaces").read_text()):
        pytest.skip("this system has no user namespaces")
    assert another_user.does(look_around_in_own_network) == [NOBODY, ["lo"], True]


def test_a_network_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(network_namespace, "_call_unshare", lambda flags: False)
    with pytest.raises(LabError, match="LABKIT_NETWORK=own: this system gives no network of its own"):
        network_namespace.enter_namespace()
    monkeypatch.setenv(ENV_NETWORK, "other")
    with pytest.raises(ParameterError, match="LABKIT_NETWORK='other' is none of own"):
        labkit.run(PROGRAMS / "small.py")
    monkeypatch.setenv(ENV_NETWORK, "own")
    monkeypatch.setattr(network_namespace.sys, "platform", "darwin")
    with pytest.raises(ParameterError, match="needs Linux, and this is darwin"):
        labkit.run(PROGRAMS / "small.py")


def put_another_in_its_place(run, pickled):
    os.rename(run, f"{run}-mine-now")
    os.mkdir(run, 0o777)
    Path(run, "given.pickle").write_bytes(bytes.fromhex(pickled))


def test_ranks_unpickle_nothing_that_another_user_put_in_its_place(another_user, open_place, tmp_path, monkeypatch):
    """In a folder in which all may write and rename, which labkit would not have made."""
    runs = open_place / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    give = folders.RunFolder.write_payload

    def give_and_lose(folder, content):
        give(folder, content)
        another_user.does(put_another_in_its_place, str(folder.path), pickle.dumps(Touch(tmp_path / "bait")).hex())

    monkeypatch.setattr(folders.RunFolder, "write_payload", give_and_lose)
    with pytest.raises(RankFailed, match=r"given\.pickle is not what the notebook gave to this run"):
        labkit.run(PROGRAMS / "everything.py", device="cpu", use={"number": nine})
    assert not (tmp_path / "bait").exists()


def take(place, how, victims):
    """Take a place before somebody else makes a folder there."""
    if how == "link":
        os.symlink(victims, place)
    elif how == "file":
        Path(place).touch()
    else:
        os.mkdir(place, 0o777)
        for name in ("lock", f"00000001-64-1-{os.getpid()}-running"):
            fcntl.flock(os.open(f"{place}/{name}", os.O_CREAT | os.O_RDWR, 0o666), fcntl.LOCK_EX)


@pytest.mark.parametrize("how", ["folder", "link", "file"])
def test_nobody_else_stands_in_the_way_of_the_queue(another_user, open_place, home, monkeypatch, how):
    place, victims = open_place / "tmp" / f"labkit-queue-{os.getuid()}", open_place / "victims"
    victims.mkdir(mode=0o700)
    precious = [victims / "lock", victims / "00000001-64-1-1-running"]
    for path in precious:
        path.write_text("precious")
    another_user.does(take, str(place), how, str(victims))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))  # another user's, as after sudo
    begun = time.monotonic()
    with run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail):
        (own,) = home.iterdir()
        assert own.name.startswith(f".labkit-queue-{os.getuid()}-") and len(run_queue.live_tickets(own)) == 1
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert time.monotonic() - begun < private_files.LOCK_TIMEOUT_S
    assert [path.read_text() for path in precious] == ["precious", "precious"]


def test_nobody_else_enters_the_queue(another_user, open_place, home):
    with run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail):
        (own,) = (open_place / "tmp").iterdir()
        paths = [str(path) for path in (own, *own.iterdir())]
        assert len(paths) == 3 and own.name == f"labkit-queue-{os.getuid()}"
        assert another_user.does(what_works, paths) == [[str(own), "see"]], "that there is one is all they learn"


def test_a_lock_is_waited_for_as_long_as_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(ENV_QUEUE)
    monkeypatch.setattr(private_files, "LOCK_TIMEOUT_S", 0.2)
    place = tmp_path / f"labkit-queue-{os.getuid()}"
    place.mkdir()
    with (
        private_files.lock_file(place / "lock"),
        pytest.raises(LabError, match=r"no queue: .*/lock: another process keeps it locked for more than 0\.2 s"),
        run_queue.wait_for_turn(ResourceNeeds(1, 0, False), pytest.fail),
    ):
        pass


def test_programs_that_torch_compiled_come_from_a_private_folder(another_user, open_place, home, monkeypatch, tmp_path):
    place = open_place / "tmp" / f"torchinductor_{os.getuid()}"
    monkeypatch.delenv(compile_cache.ENV_COMPILE_CACHE, raising=False)  # torch sets it in a process that compiles
    run = folders.RunFolder(tmp_path)
    assert process.rank_environment(run, 2, "cpu")[compile_cache.ENV_COMPILE_CACHE] == str(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.rmdir()
    another_user.does(take, str(place), "folder", "")
    monkeypatch.setenv(
        compile_cache.ENV_COMPILE_CACHE, str(open_place / "tmp" / "torchinductor_root")
    )  # as torch says it
    assert Path(process.rank_environment(run, 2, "cpu")[compile_cache.ENV_COMPILE_CACHE]).parent == home
    monkeypatch.setenv(compile_cache.ENV_COMPILE_CACHE, "/as/one/likes")
    assert process.rank_environment(run, 2, "cpu")[compile_cache.ENV_COMPILE_CACHE] == "/as/one/likes"


def make_copies(*places):
    for place in places:
        os.makedirs(os.path.join(place, ".labkit", "pristine"))


def test_copies_of_another_user_are_not_taken_for_ones_own(another_user, open_place, monkeypatch):
    """JupyterLab executes the configuration in the hidden folder; runs and verdicts lie beside it."""
    shared, mine = open_place / "tmp", open_place / "tmp" / "mine"
    (mine / "work").mkdir(parents=True)
    another_user.does(make_copies, str(shared), str(shared / "my"))
    monkeypatch.chdir(mine / "work")
    monkeypatch.setattr(folders, "IN_CHECKOUT", False)
    monkeypatch.setattr(verdict_store, "STARTED_IN", mine / "work")
    assert folders.workspace_folder() == mine / "work" and verdict_store.progress_path() is None
    with pytest.raises(LabError, match=r"my/\.labkit: it belongs to another user, .*take another folder"):
        jupyter.prepare_environment(shared / "my")
    (shared / "my" / ".labkit").rename(shared / "my" / "theirs")
    with pytest.raises(LabError, match=r"/my: it belongs to another user, .*take another folder"):
        jupyter.prepare_environment(shared / "my")
    (mine / ".labkit" / "pristine").mkdir(parents=True)
    assert folders.workspace_folder() == mine.parent and verdict_store.progress_path() == mine / "progress.json"


def test_processes_of_another_user_are_not_touched_whatever_they_say_they_are(another_user, tmp_path):
    words = {"env": {ENV_RUN_FOLDER: str(tmp_path)}, "user": NOBODY, "group": NOBODY, "extra_groups": []}
    with subprocess.Popen(["/bin/sleep", "600"], **words) as theirs:
        assert process.kill_run_processes(tmp_path) == []
        assert theirs.poll() is None
        theirs.kill()


@functools.cache
def calls():
    """Every call in labkit's own code: its file, the name that is called, and its named arguments."""
    paths = [
        path
        for part in ("labkit", "labkit_course", "launch", "notebooks", "benchmarks")
        for path in (ROOT / part).rglob("*.py")
    ]
    return [
        (path.relative_to(ROOT).as_posix(), name_of(node.func), {each.arg: each.value for each in node.keywords})
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def name_of(function):
    """Such as ``os.path.join``; what is no name is left out."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


SHELLS = r"os\.(system|popen|spawn\w+)|subprocess\.get(status)?output|pty\.spawn|.*\.create_subprocess_shell"


def test_no_command_goes_through_a_shell():
    names = [name for _, name, _ in calls()]
    assert len(names) > 5000 and names.count("subprocess.run") + names.count("subprocess.Popen") >= 5
    assert [(file, name) for file, name, named in calls() if "shell" in named or re.fullmatch(SHELLS, name)] == []


UNPICKLED = {
    ("labkit/session/payload.py", "pickle.load"): "its SHA-256 came with the environment",
    ("labkit/parallel/safe_checkpoint.py", "pickle.Unpickler"): "finds nothing but what is listed there",
    ("labkit_course/checks/ranks/failures.py", "pickle.loads"): "what torch has just made in the same process",
}
UNPICKLERS = r"(\w*pickle|dill|joblib|marshal|shelve)\.(loads?|open|Unpickler)|\w+\.read_pickle|yaml\.\w*load"


def test_nothing_is_unpickled_that_another_user_could_have_written():
    found = {(file, name) for file, name, _ in calls() if re.fullmatch(UNPICKLERS, name)}
    assert {("labkit/session/payload.py", "pickle.load")} <= found <= UNPICKLED.keys()
    loads = [
        (file, getattr(named.get("weights_only"), "value", None))
        for file, name, named in calls()
        if name == "torch.load"
    ]
    assert len(loads) >= 5 and {said for _, said in loads} == {True}, loads
    assert [file for file, name, _ in calls() if name in ("np.load", "numpy.load")] == []
    # Neither a notebook's cell nor the plain program of lab 8, which needs PyTorch alone, reads another's saves.
    learners = ("notebooks", "launch/cluster/train.py")
    ours = [(name, named) for file, name, named in calls() if not file.startswith(learners)]
    readers = [named.get("storage_reader") for name, named in ours if name in ("state_dict_loader.load", "dcp.load")]
    assert readers and {reader and name_of(reader.func) for reader in readers} == {"SafeCheckpointReader"}


def test_every_promise_has_tests_that_there_are():
    promised = re.findall(r"`(test_\w+)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())
    for file, name in promised:
        assert f"\ndef {name}(" in (Path(__file__).parent / f"{file}.py").read_text(), (file, name)
    held_here = {name for file, name in promised if file == "test_security"}
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_promise_has_tests_that_there_are"}
    assert held_here == here
