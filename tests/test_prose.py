"""The labs' text leans on itself: few short sentences, none in brackets, captions that say one thing."""

import nbformat
import pytest

from notebooks.tools import build
from notebooks.tools.prose import Prose, measure_prose
from notebooks.tools.source import find_labs, read_source

TEXT = """\
Short ones tire. A longer sentence of this kind carries a thought, and its reasons, to the end.

*A caption of six words only.*

*Takeaway: this one is no caption, though it stands in italics like one.*

- A list is left out.

<details><summary>Folded</summary>

So is this.

</details>

(This whole sentence stands in brackets.)
"""


def test_sentences_and_captions_are_counted():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(TEXT), nbformat.v4.new_code_cell("x = 1")])
    # two of the first paragraph, the caption, the takeaway and the one in brackets
    assert measure_prose(notebook) == Prose(sentences=5, short_share=3 / 5, bracket_share=1 / 5, caption_words=6)


@pytest.mark.parametrize("lab", find_labs(build.FOLDER), ids=lambda lab: lab.name)
def test_a_lab_reads_easily(lab):
    found = measure_prose(read_source(lab.source))
    assert found.sentences > 50
    assert found.short_share <= 0.20, "sentences of at most eight words: join some"
    assert found.bracket_share <= 0.01, "whole sentences in brackets"
    assert found.caption_words <= 40, "words of the longest caption"
