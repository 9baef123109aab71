"""How long something may take, where other tests run beside it and have run before it."""

import gc
import time
from contextlib import contextmanager


@contextmanager
def within(limit_s, clock=time.perf_counter):
    """Fails the test if the block takes limit_s or more.

    The garbage collector waits meanwhile, as in timeit: after some thousand tests one full collection takes 0.7 s.
    """
    gc.disable()
    begun = clock()
    try:
        yield
    finally:
        gc.enable()
    took = clock() - begun
    assert took < limit_s, f"took {took:.2f} s, not less than {limit_s}"
