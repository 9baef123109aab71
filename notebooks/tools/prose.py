"""How the labs' text reads: the share of short sentences, of sentences in brackets, and the longest caption.

    python -m notebooks.tools.prose

Text that is folded, tables, lists, quotations and headings are left out.
"""

import re
from dataclasses import dataclass

from notebooks.tools.source import Notebook, find_labs, read_source

SHORT_WORDS = 8
"""A sentence of at most so many words is short. Many of them in a row tire a reader."""
FOLDED = re.compile(r"<details>.*?</details>|```.*?```", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`*(])")


@dataclass(frozen=True)
class Prose:
    """Figures of a notebook's running text."""

    sentences: int
    short_share: float
    """Of all sentences, those with at most SHORT_WORDS words."""
    bracket_share: float
    """Of all sentences, those that stand in brackets as a whole."""
    caption_words: int
    """Words of the longest caption, a paragraph in italics."""


def measure_prose(notebook: Notebook) -> Prose:
    """Measure the text cells of a notebook."""
    paragraphs = [
        " ".join(each.split())
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for each in re.split(r"\n\s*\n", FOLDED.sub("", cell.source))
        if each.strip() and not re.match(r"\s*(#|\||- |> |\d\. )", each)
    ]
    sentences = [sentence for each in paragraphs for sentence in SENTENCE_END.split(each)]
    short = [each for each in sentences if len(each.split()) <= SHORT_WORDS]
    in_brackets = [each for each in sentences if each.startswith("(") and each.endswith((")", ")."))]
    captions = [len(each.split()) for each in paragraphs if re.fullmatch(r"\*(?!\*|Takeaway).*\*", each)]
    count = max(1, len(sentences))
    return Prose(len(sentences), len(short) / count, len(in_brackets) / count, max(captions, default=0))


def main() -> None:
    """Print a line a lab."""
    from notebooks.tools.build import FOLDER

    print(f"{'':28} sentences   short  in brackets  longest caption")
    for lab in find_labs(FOLDER):
        found = measure_prose(read_source(lab.source))
        shares = f"{found.short_share:7.1%} {found.bracket_share:12.1%}"
        print(f"{lab.name:28} {found.sentences:9} {shares} {found.caption_words:16}")


if __name__ == "__main__":
    main()
