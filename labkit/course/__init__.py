"""A learner's way through the labs: copies to work in, kept verdicts, and exports for a teacher.

| file             | purpose                                                                |
|------------------|------------------------------------------------------------------------|
| lab_catalog.py   | the labs and their exercises, as named in the learner's notebooks      |
| copies.py        | ``my/``: create, reset and update copies                               |
| merge.py         | merge the old, the new and the learner's version of a notebook         |
| jupyter.py       | JupyterLab on ``my/`` alone                                            |
| verdict_store.py | the verdict of every check, kept beside the copies                     |
| exports.py       | one file for a teacher, and many such files as one table               |
| judging.py       | notebooks executed for a command's exit status                         |
| commands.py      | the command line                                                       |
"""
