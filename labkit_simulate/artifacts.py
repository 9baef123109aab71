"""Names of the files that simulated ranks write and the notebook reads."""

ARTIFACT_MEMORY, ARTIFACT_BLOCKS, ARTIFACT_EVENTS = "memory", "blocks", "events"
"""Names of the texts that a simulated rank keeps: what it held, whose that was, and its step."""
