"""Names by which the two sides of a simulation know each other: its ranks, and who starts and reads them."""

ARTIFACT_MEMORY, ARTIFACT_BLOCKS, ARTIFACT_EVENTS = "memory", "blocks", "events"
"""Names of the texts that a simulated rank keeps: what it held, whose that was, and its step."""
