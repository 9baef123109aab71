"""Plain single-device modules: no rank, environment or process group inside. Parallelism is applied
from outside.
"""
