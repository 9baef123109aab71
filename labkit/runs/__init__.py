"""A run on disk: its folder, the records in it, the result that is read from it, and the history of
all runs.
"""
