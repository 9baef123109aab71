"""Outside the ranks: start them, watch them, stop them, say what went wrong.

The processes of a run, each started by the one before:

1. the notebook, or a command: run.py, progress.py, failure.py, and magic.py for ``%%torchrun``;
2. the fork server, where runs start warm: warm_start.py keeps it, fork_server.py runs in it;
3. torchrun, one for each run: process.py starts and ends it, torchrun.py runs in it;
4. the ranks: worker.py runs the program, and payload_pickling.py packs what the notebook sends.

Each ends with the one that started it, however that ends.
"""
