"""labkit: launch real ranks from a notebook, measure them, compare with theory and with one device.

    result = labkit.run("convnext_spatial", nproc=4, strategy="local")

A module imports only from modules with a lower number:

| layer | modules                                                    |                                        |
|-------|------------------------------------------------------------|----------------------------------------|
| 0     | errors, records, theory/, config, folder, upstream, photo, | plain things that know nothing of      |
|       | compiler, generated/, models/, tensors/                    | ranks                                  |
| 1     | parallel/                                                  | one technique a file                   |
| 2     | rank, meter, wire, timeline, trace, instrument, parity/    | inside a rank                          |
| 3     | run, result, failure, process, torchrun, worker, progress, | start ranks, watch them, read results; |
|       | simulate, local_ranks, doctor                              | what this machine can do               |
| 4     | plots/                                                     | results to figures                     |
| 5     | widgets/, checks/, magics, __main__                        | controls, exercises, the command line  |
"""

from labkit.errors import LabError, ParameterError, RankFailed, RecordError, RunTimedOut
from labkit.result import RunResult, load
from labkit.run import run, sweep

__all__ = [
    "LabError",
    "ParameterError",
    "RankFailed",
    "RecordError",
    "RunResult",
    "RunTimedOut",
    "load",
    "run",
    "sweep",
]
