"""A learner's way through the labs: copies to write in, verdicts that are kept, progress that a
teacher can collect.

| file         | what it is for                                                             |
|--------------|----------------------------------------------------------------------------|
| catalog.py   | the labs and their exercises, as the learner's notebooks name them         |
| copies.py    | ``my/``: made, reset, updated                                              |
| merge.py     | one notebook out of three: as it was, as it is now, as the learner has it  |
| jupyter.py   | JupyterLab on ``my/`` alone                                                |
| verdicts.py  | what each check said, kept beside the copies; how far a learner is         |
| collect.py   | one file for a teacher; many such files as one table                       |
"""
