"""How a torchrun that is alone meets itself: its ranks are forked while no thread of a store can hold a lock."""

import os
import subprocess
import sys

ONE_HOST = """
import os
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from labkit.launcher import rendezvous_handlers

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
alone = rendezvous_handlers.SingleHostHandler("a run")
info = alone.next_rendezvous()
info.store.set("of torchrun's own", "1")
print(threads() - before, info.bootstrap_store_info.master_port == alone.port)
early = os.fork()
if early == 0:
    rank = dist.TCPStore("127.0.0.1", alone.port, is_master=False)
    rank.set("from a rank", "was heard")
    os._exit(0)
context = SubprocessContext.__new__(SubprocessContext)
context.nprocs, context.subprocess_handlers = 0, {}
context._start()
print(os.waitstatus_to_exitcode(os.waitpid(early, 0)[1]), threads() > before)
rank = dist.TCPStore("127.0.0.1", alone.port, is_master=False)
print(rank.get("from a rank").decode())
"""


def test_no_thread_runs_until_the_ranks_are_forked_and_one_that_connects_before_waits():
    """A store's thread names who connects (getnameinfo); a rank forked meanwhile waited for glibc's lock for ever."""
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # no threads of numpy's, which end at a fork
    answer = subprocess.run([sys.executable, "-c", ONE_HOST], capture_output=True, text=True, timeout=60, env=alone)
    assert answer.stdout.splitlines() == ["0 True", "0 True", "was heard"], answer.stderr
