"""Lab 8's launches: typed on two hosts and read, and both must come to the same end."""

import time
from pathlib import Path

import pytest
from fixture_long import long_but

from labkit_cluster.local_hosts import can_make_namespaces, start_local_hosts
from labkit_cluster.typed import Terminals
from labkit_course import launches
from labkit_course.launches import LINES, begins_alone, launch, problem_of, read_line, recorded_words, world_size

pytestmark = [pytest.mark.calm, pytest.mark.xdist_group("hosts"), pytest.mark.timeout(240)]
needs_root = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root on Linux and iproute2")
HEAD = "$(cat head.txt || echo localhost)"
MENDED = {
    "first": LINES["first"].replace("$(hostname -i)", "host0"),
    "second": LINES["second"].replace("docker0", "eth0"),
    "third": LINES["third"].replace(HEAD, "host0").replace("--nnodes 1:2", "--nnodes 2"),
}
OTHERS = {
    "nobody owns it": MENDED["third"].replace("host0:", "10.77.0.1:"),
    "said who owns it": MENDED["third"].replace("host0:", "10.77.0.1:").replace("join", "is_host=$IS_HOST,join"),
    "loopback": MENDED["second"].replace("eth0", "lo"),
    "its own address": LINES["first"].replace("$(hostname -i)", "$ADDRESS"),
    "static": MENDED["second"]
    .replace("--rdzv-backend c10d", "--node-rank $((1 - IS_HOST)) --master-addr host0")
    .replace("--rdzv-endpoint host0:29500", "")
    .replace("--rdzv-conf is_host=$IS_HOST,join_timeout=12,read_timeout=5,last_call_timeout=2", ""),
}


@pytest.fixture(scope="module")
def terminals(tmp_path_factory):
    with start_local_hosts(2) as hosts:
        made = Terminals(hosts, tmp_path_factory.mktemp("shared"))
        (made.folder / "who.py").write_text(launches.WHO)
        yield made


@needs_root
def test_a_host_is_a_machine_with_a_name_that_leads_to_loopback(terminals):
    before = Path("/etc/hosts").read_text()
    said = terminals.run('hostname; hostname -i; echo "$ADDRESS $IS_HOST"; ls /sys/class/net >/dev/null; pwd')
    folder = str(terminals.folder)
    assert said["host0"].split() == ["host0", "127.0.1.1", "10.77.0.1", "1", folder]
    assert said["host1"].split() == ["host1", "127.0.1.1", "10.77.0.2", "0", folder]
    assert Path("/etc/hosts").read_text() == before


@needs_root
def test_what_runs_too_long_is_killed(terminals):
    assert terminals.run("echo begun; sleep 600", "host1", limit_s=0.5) == {"host1": "begun\n"}


def test_words_are_waited_for_until_they_are_printed_or_the_line_has_ended(terminals):
    begun = time.monotonic()
    terminals.start("echo begun; sleep 600")
    terminals.wait_for("begun", "host0")
    terminals.stop()
    terminals.wait_for("never", "host1")
    assert time.monotonic() - begun < 60


LINES_TO_TRY = {f"{name}, mended": line for name, line in MENDED.items()} | OTHERS


@needs_root
@pytest.mark.parametrize("name", long_but(["first, mended"], list(LINES_TO_TRY)))
def test_a_line_is_read_as_it_runs(terminals, name):
    line = LINES_TO_TRY[name]
    told = read_line(line)
    problem, _ = problem_of(told)
    assert (world_size(terminals.run(line)) == 4) == (not problem), problem
    assert begins_alone(told) == ""


@needs_root
@pytest.mark.parametrize("name", LINES)
def test_broken_launches_show_torchruns_own_words_and_the_recorded_ones_are_like_them(terminals, name, capsys):
    said = launch(name, terminals)
    assert LINES[name] in capsys.readouterr().out
    told = read_line(LINES[name])
    assert problem_of(told)[0] and begins_alone(told) == ("host0" if name == "third" else "")
    recorded = recorded_words()[name]
    assert world_size(said) == world_size(recorded) == {"first": 0, "second": 0, "third": 2}[name]
    # a host may be the first to give up, and then the other's words are about that
    told = "\n".join("\n".join(launches.telling_lines(text)) for text in said.values())
    for words in WORDS[name]:
        assert words in told and words in "".join(recorded.values())


WORDS = {
    "first": ("RendezvousTimeoutError", "timed out after 5000ms while trying to connect to (127.0.1.1, 29500)"),
    "second": ("Gloo connectFullMesh failed", "Connection refused, remote=[172.17.0.1]:"),
    "third": ("No such file or directory", "localhost:29500", "group_world_size=1", "global_world_sizes=[2, 2]"),
}
"""What torchrun and gloo themselves say."""


def test_elsewhere_recorded_words_are_shown_and_said_to_be(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("labkit_cluster.local_hosts.can_make_namespaces", lambda: False)
    with start_local_hosts(2) as hosts:
        said = launch("first", Terminals(hosts, tmp_path))
    shown = capsys.readouterr().out
    assert "(recorded: without root" in shown and "while trying to connect to (127.0.1.1, 29500)" in shown
    assert world_size(said) == 0


def test_what_is_empty_or_no_function_loses_no_host(terminals):
    def empty(model): ...

    line = launches.working_line(terminals.hosts)
    assert launches.lose_host(terminals, line, empty) is launches.lose_host(terminals, line, "text") is None
    assert not (terminals.folder / "train.py").exists()


def test_a_program_holds_the_learners_functions(tmp_path):
    def all_stop(asked: bool) -> bool:
        return asked  # the learner's

    def train(model, optimizer, one_step, folder, steps, every):
        one_step(0)  # hers, too

    text = launches.write_program(tmp_path, all_stop=all_stop, train=train).read_text()
    compile(text, "train.py", "exec")
    assert "# the learner's" in text and "# hers, too" in text
    assert "ReduceOp.MAX" not in text and "dcp.save" not in text


def test_without_machines_the_traffic_of_others_is_shown_and_said_to_be(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("labkit_cluster.local_hosts.can_make_namespaces", lambda: False)
    with start_local_hosts(2) as hosts:
        line = launches.working_line(hosts)
        counted = launches.measure_traffic(Terminals(hosts, tmp_path), line, 2, 512)
    assert counted == pytest.approx({"fsdp_times": 3, "hsdp_times": 1}, rel=0.03)
    assert "(recorded, with 2 ranks on each host" in capsys.readouterr().out


@needs_root
def test_the_cards_count_what_theory_says_and_a_little_more(terminals):
    counted = launches.measure_traffic(terminals, launches.working_line(terminals.hosts), 2, 512)
    assert counted == pytest.approx({"fsdp_times": 3, "hsdp_times": 1}, rel=0.03)
    assert counted["fsdp_times"] >= 3 and counted["hsdp_times"] >= 1
