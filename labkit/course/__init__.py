"""A learner's way through the labs: copies to write in, verdicts that are kept, progress that a
teacher can collect.

| module           | purpose                                                         |
|------------------|-----------------------------------------------------------------|
| lab_catalog.py   | the labs and their exercises, as the learner's notebooks name them |
| copies.py        | the learner's copies in ``my/``: make, reset, update            |
| merge.py         | three-way merge of a notebook: original, new version, learner's |
| jupyter.py       | JupyterLab on ``my/`` alone                                     |
| verdict_store.py | verdicts of the checks, stored beside the copies; progress      |
| exports.py       | one file per learner for a teacher; many such files as one table |
"""
