"""A run on disk: its folder, its records, the result read from them, and the history of runs."""
