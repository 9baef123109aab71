"""The course around the labs: exercises judged, explorers, a learner's copies, and progress.

It uses labkit, and the simulator and the cluster where a lab does; none of them knows it.

| file or folder   | purpose                                                                |
|------------------|------------------------------------------------------------------------|
| checks/          | exercises judged, one file a lab; ``ranks/`` holds what runs in ranks  |
| widgets/         | explorers: controls over theory, confirmed by a run                    |
| plan_explorer.py | the explorer of a plan that was found, for lab 6                       |
| lab_catalog.py   | the labs and their exercises, as named in the learner's notebooks      |
| copies.py        | ``my/``: create, reset and update copies                               |
| merge.py         | merge the old, the new and the learner's version of a notebook         |
| jupyter.py       | JupyterLab on ``my/`` alone                                            |
| verdict_store.py | the verdict of every check, kept beside the copies                     |
| exports.py       | one file for a teacher, and many such files as one table               |
| preflight.py     | one line for a class: PASS or FAIL                                     |
| tutor_guide.md   | what an AI tutor does and does not do; the copies' AGENTS.md           |
| judging.py       | notebooks executed for a command's exit status                         |
| commands.py      | the command line                                                       |
"""
