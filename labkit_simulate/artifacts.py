"""Names by which the two sides of a simulation know each other: its ranks, and who starts and reads them."""

ENV_SIMULATION = "LABKIT_SIMULATED"
"""Environment variable for simulated ranks: as JSON how many there are, and how many on each host."""
ARTIFACT_MEMORY, ARTIFACT_BLOCKS, ARTIFACT_EVENTS = "memory", "blocks", "events"
"""Names of the texts that a simulated rank keeps: what it held, whose that was, and its step."""
