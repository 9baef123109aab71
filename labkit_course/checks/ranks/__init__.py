"""Code that runs inside the ranks of a check: the shared program and one ``run_answer`` per lab."""
