"""The glossary's terms, and links to them from the text of the labs."""

import re

ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.*(?:\n  .*)*)", re.MULTILINE)
PROTECTED = re.compile(
    r"(```.*?```|``[^`]+``|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^<[^\n]*$|<[^>]+>|^#[^\n]*$|https?://\S+)",
    re.DOTALL | re.MULTILINE,
)
"""What no link may be put into: code, links, HTML and what stands beside it, headings."""
ORDINARY = {"buffer", "claim", "estimated", "graph", "host", "measured", "scale", "stack", "stamp"}
"""Terms that are ordinary words, too: they are linked only where a lab prints them in bold."""


def read_terms(glossary: str) -> list[str]:
    """The glossary's terms, the longest first, so that "tensor parallelism" is found before "tensor"."""
    return sorted((match[1] for match in ENTRY.finditer(glossary)), key=len, reverse=True)


def written_as_glossary(text: str) -> str:
    """The glossary's page with its list as Sphinx's own, to which terms can link."""
    head = text[: ENTRY.search(text).start()]
    entries = [f"{match[1]}\n  {' '.join(match[2].split())}" for match in ENTRY.finditer(text)]
    return head + "```{glossary}\n" + "\n\n".join(entries) + "\n```\n"


def pattern_of(term: str) -> re.Pattern[str]:
    """What finds a term in a text: also as a plural, and with another first letter's case."""
    first, rest = term[0], re.escape(term[1:]).replace(r"\ ", r"\s+")
    letter = f"[{first.lower()}{first.upper()}]" if rest.islower() or not first.isupper() else first
    plural = "(?:s|es)?"
    if term in ORDINARY:
        return re.compile(rf"(?<=\*\*){letter}{rest}{plural}(?=\*\*)")
    return re.compile(rf"(?<![\w-]){letter}{rest}{plural}(?![\w-])")


def link_terms(text: str, terms: list[str], linked: set[str]) -> str:
    """A text in which each term, where it comes first, links to the glossary.

    Args:
        text: Markdown.
        terms: those of ``read_terms``.
        linked: terms that an earlier text has linked, to which those of this text are added.
    """
    for term in terms:
        if term in linked:
            continue
        parts = PROTECTED.split(text)
        for place in range(0, len(parts), 2):  # the others are protected
            found = pattern_of(term).search(parts[place])
            if found:
                shown = " ".join(found[0].split())
                role = f"{{term}}`{shown} <{term}>`"
                parts[place] = parts[place][: found.start()] + role + parts[place][found.end() :]
                linked.add(term)
                text = "".join(parts)
                break
    return text
