"""What a test holds of a message: the value, the rule and the fix by their key words, and not the prose between."""

import re


def words(text: str) -> str:
    """Make a pattern for pytest.raises(match=…): the parts of ``text`` in order, with anything where "…" stands."""
    return "(?s)" + ".*".join(re.escape(part.strip()) for part in text.split("…"))
