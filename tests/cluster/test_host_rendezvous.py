"""How hosts find each other: listeners, probes and heartbeats on real sockets, and the same choice everywhere."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from labkit.errors import NotAllHosts, ParameterError
from labkit_cluster import host_rendezvous, listeners
from labkit_cluster.host_rendezvous import FolderMailbox, RendezvousMember, choose_addresses, join_rendezvous
from labkit_cluster.hosts import Host, parse_hosts
from labkit_cluster.listeners import Heartbeats, Listeners, probe_listeners

HERE = "127.0.0.1"


def test_hosts_that_share_a_folder_meet_and_hear_each_other(tmp_path):
    guests = [RendezvousMember(index, 3, f"node{index}", "secret", HERE) for index in range(3)]
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        met = list(threads.map(lambda guest: join_rendezvous(guest, FolderMailbox(tmp_path)), guests))
    assert time.monotonic() - begun < 2
    assert {(each.address, each.local_address, each.port) for each in met} == {(HERE, HERE, met[0].port)}
    assert [each.listener is None for each in met] == [False, True, True]
    assert met[0].listener.getsockname() == (HERE, met[0].port)
    with socket.create_connection((HERE, met[0].port)):  # nobody answers any more, but the system still lets one in
        assert [each.heartbeats.unreachable_peers() for each in met] == [[], [], []]
    met[1].heartbeats.close()
    assert met[0].heartbeats.unreachable_peers() == [], "it has said farewell"
    for line in met[2].heartbeats._links.values():
        line.close()
    assert met[0].heartbeats.unreachable_peers() == ["node2"]
    met[0].listener.close()


def test_a_door_is_opened_to_those_alone_who_know_the_token():
    with Listeners("secret", [HERE, "192.0.2.7"]) as mine:  # the second is nobody's
        places = {(0, HERE): mine.ports[HERE]}
        assert list(mine.ports) == [HERE]
        with socket.create_connection((HERE, mine.ports[HERE])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert probe_listeners(places, "guessed", 1)[0, HERE].problem == "somebody else answers there"
            known = probe_listeners(places, "secret", 2)[0, HERE]
            assert stranger.recv(1) == b""
        assert (known.problem, known.local_address, list(mine.links)) == ("", HERE, [(2, HERE)])
        assert abs(known.clock_ahead_s) < 0.5
        known.link.close()


def test_a_clock_that_is_ahead_is_noticed():
    with socket.create_server((HERE, 0)) as other:

        def answer():
            visitor, _ = other.accept()
            moment = repr(time.time() + 100).encode()
            visitor.sendall(moment + b" " + listeners._hmac_proof("secret", b"host", moment) + b"\n")
            visitor.close()

        threading.Thread(target=answer).start()
        found = probe_listeners({(0, HERE): other.getsockname()[1]}, "secret", 1)[0, HERE]
    assert found.clock_ahead_s == pytest.approx(100, abs=0.5)
    found.link.close()


def test_a_silent_host_is_lost_and_one_that_was_suspended_is_not(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(listeners, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ours, theirs = socket.socketpair()
    heartbeats = Heartbeats({"host1": ours})

    def after(seconds):
        clock.now += seconds
        return heartbeats.unreachable_peers()

    assert after(100) == after(5000) == after(0.1) == [], "this host was suspended, and has beaten twice"
    assert [after(2) for _ in range(listeners.HEARTBEAT_MISS_LIMIT - 2)] == [[]] * (listeners.HEARTBEAT_MISS_LIMIT - 2)
    theirs.send(listeners.HEARTBEAT_BYTE)
    assert [after(2) for _ in range(listeners.HEARTBEAT_MISS_LIMIT + 1)] == [[]] * (listeners.HEARTBEAT_MISS_LIMIT + 1)
    assert after(2) == ["host1"]
    heartbeats.close()
    theirs.close()


def cards(**own):
    """What hosts say first: their addresses."""
    return [{"ports": dict.fromkeys(addresses, 1)} for addresses in own.values()]


def reports(*reached):
    """What they say next: for each host, by host, the addresses that it reached and its own on the way."""
    return [{"reached": {str(host): ways for host, ways in each.items()}, "problems": {}} for each in reached]


def test_the_address_is_one_that_all_hosts_reach():
    own = cards(host0=["172.17.0.1", "10.0.0.1", "10.1.0.1"], host1=["10.0.0.2"], host2=["10.0.0.3", "10.1.0.3"])
    told = reports(
        {1: {"10.0.0.2": "10.0.0.1"}, 2: {"10.0.0.3": "10.0.0.1", "10.1.0.3": "10.1.0.1"}},
        {0: {"10.0.0.1": "10.0.0.2"}, 2: {"10.0.0.3": "10.0.0.2"}},
        {0: {"172.17.0.1": "172.17.0.9", "10.1.0.1": "10.1.0.3", "10.0.0.1": "10.0.0.3"}, 1: {"10.0.0.2": "10.0.0.3"}},
    )
    assert choose_addresses(["host0", "host1", "host2"], own, told) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            [{}, {0: {"10.1.0.1": "a"}}, {0: {"10.0.0.1": "c"}}],
            "host0 has no address that all hosts reach .host1 reaches",
        ),
        ([{}, {0: {"10.0.0.1": "b"}}, {}], "host2 cannot reach host0"),
        (
            [{}, {0: {"10.0.0.1": "b"}}, {0: {"10.0.0.1": "c"}}],
            "host0 cannot reach host1 .b: not tried.: let the firewall",
        ),
    ],
)
def test_hosts_that_do_not_reach_each_other_are_named(told, message):
    own = cards(host0=["10.0.0.1", "10.1.0.1"], host1=["b"], host2=["c"])
    with pytest.raises(NotAllHosts, match=rf"^{message}"):
        choose_addresses(["host0", "host1", "host2"], own, reports(*told))


def test_one_host_alone_stays_on_loopback():
    assert host_rendezvous._usable_addresses(RendezvousMember(0, 1, "host0", "secret")) == [HERE]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "hosts = .. is no list of hosts: give their names, such as ..host0., .host1.."),
        ("host0", "hosts = .host0. is no list of hosts"),
        ({"host0"}, "hosts = ..host0.. is no list of hosts"),
        (["host0", Host("host0")], "hosts = ..host0., .host0.. names one twice: its ranks are set by nproc"),
        ([3], "host 3 is no name that ssh could reach"),
        (["-oProxyCommand=touch /tmp/here"], "is no name that ssh could reach: give one as in `ssh NAME true`"),
        (["two\nlines"], "is no name that ssh could reach"),
    ],
)
def test_what_are_no_hosts_is_refused(hosts, message):
    with pytest.raises(ParameterError, match=message):
        parse_hosts(hosts)


def test_words_for_a_shell_at_the_other_end_are_quoted(monkeypatch):
    monkeypatch.setenv("LABKIT_SSH", "ssh -F 'my settings'")
    words = Host("user@host1", python="/opt/my python").agent_command()
    assert words[:3] == ["ssh", "-F", "my settings"] and words[-3:-1] == ["--", "user@host1"]
    assert " '/opt/my python' -P -m labkit_cluster.host_agent" in words[-1]
    assert not [word for word in words if "StrictHostKeyChecking" in word or "UserKnownHosts" in word]
    monkeypatch.setenv("LABKIT_SSH", "ssh -F 'my settings")
    with pytest.raises(ParameterError, match=r"LABKIT_SSH=.* is no command: No closing quotation"):
        Host("host1").agent_command()
