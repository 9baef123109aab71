"""Slides of a lab from its solved notebook: one a section, with script, figures, takeaway and question for the room."""

import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from docs.book.labs import CAPTION, plain, text_of
from docs.book.plans import table_rows

HEADING = re.compile(r"^## (\d+)\. ([^\n]+?)(?: \(\d+ minutes?\))?$", re.MULTILINE)
FOLD = re.compile(r"<details>.*?</details>", re.DOTALL)
POINT = re.compile(r"^(?:\d+\.|-) (.+(?:\n +\S.*)*)", re.MULTILINE)
TAKEAWAY = re.compile(r"^\*Takeaway: (.+?)\*$", re.MULTILINE | re.DOTALL)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
html {{ scroll-snap-type: y mandatory; font: 1.5vw/1.4 sans-serif; color: #222; }} body {{ margin: 0; }}
section {{ height: 100vh; box-sizing: border-box; padding: 3vh 5vw; scroll-snap-align: start; overflow: hidden;
  display: flex; flex-direction: column; gap: 1.5vh; page-break-after: always; }}
h1 {{ font-size: 2.2em; margin: auto 0 0; }} h2 {{ margin: 0; }} p, ul {{ margin: 0; }}
div {{ flex: 1; min-height: 0; display: flex; flex-wrap: wrap; gap: 1vw;
  align-content: center; justify-content: center; }}
img {{ max-width: 100%; max-height: 100%; min-height: 0; object-fit: contain; }}
.many img {{ max-width: 48%; max-height: 49%; }}
pre {{ font-size: .62em; line-height: 1.25; margin: 0; }} .take {{ font-weight: bold; }} .ask {{ color: #06c; }}
@page {{ size: 16in 9in; margin: 0; }} @media print {{ html {{ font-size: .24in; }} section {{ height: 9in; }} }}
</style>{slides}<script>
addEventListener("keydown", event => {{
  const step = {{ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1}}[event.key];
  if (!step) return;
  event.preventDefault();
  scrollTo(0, (Math.round(scrollY / innerHeight) + step) * innerHeight);
}});
</script></html>
"""


@dataclass
class Slide:
    """What stands on one slide: Markdown, code, and figures with what they show."""

    title: str
    code: str = ""
    takeaway: str = ""
    question: str = ""
    points: list[str] = field(default_factory=list)
    """The section's list, shown where there is nothing else to see."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    """PNG in base64, and the figure's caption."""

    def as_html(self) -> str:
        """The slide as a section of the page."""
        images = [f'<img src="data:image/png;base64,{png}" alt="{html.escape(alt)}">' for png, alt in self.figures]
        shown = f"<pre>{html.escape(self.code)}</pre>" * bool(self.code) + "".join(images)
        if not shown and self.points:
            shown = "<ul>" + "".join(f"<li>{inline(each)}</li>" for each in self.points[:5]) + "</ul>"
        many = ' class="many"' if len(images) > 1 else ""
        last = f'<p class="take">{inline(self.takeaway)}</p>' * bool(self.takeaway)
        last += f'<p class="ask">{inline(self.question)}</p>' * bool(self.question)
        return f"<section><h2>{inline(self.title)}</h2><div{many}>{shown}</div>{last}</section>"


def inline(markdown: str) -> str:
    """A line of Markdown as HTML: code, bold and italic; links lose their address."""
    text = html.escape(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(markdown.split())), quote=False)
    pieces = re.split(r"`([^`]+)`", text)
    for place in range(0, len(pieces), 2):
        bold = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", pieces[place])
        pieces[place] = re.sub(r"\*([^*]+)\*", r"<i>\1</i>", bold)
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))


def read_slides(notebook: dict, questions: dict[str, str]) -> tuple[str, list[Slide]]:
    """The lab's title, and a slide for each numbered section; ``questions`` by the section's number."""
    cells, slides = notebook["cells"], []
    title = re.search(r"^# (.+)$", text_of(cells[0]), re.MULTILINE)[1]
    for place, cell in enumerate(cells):
        text = text_of(cell)
        if cell["cell_type"] == "markdown":
            for piece in re.split(r"^(?=## )", text, flags=re.MULTILINE):
                if match := HEADING.match(piece):
                    slides.append(Slide(f"{match[1]}. {match[2]}", question=questions.get(match[1], "")))
                if slides:
                    slides[-1].points += POINT.findall(FOLD.sub("", piece))
                if slides and (taken := TAKEAWAY.search(piece)):
                    slides[-1].takeaway = taken[1]
            continue
        pictures = [output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
        after = [text_of(each) for each in cells[place + 1 : place + 4] if each["cell_type"] == "markdown"]
        caption = next(filter(None, map(CAPTION.match, after)), None)
        shows = plain(caption[1]) if caption else f"The figure of section {slides[-1].title}" if slides else ""
        if slides:
            slides[-1].figures += [("".join(each).strip(), shows) for each in pictures]
            if "script" in cell["metadata"].get("tags", []):
                slides[-1].code = text.partition("\n")[2] if text.startswith("%%") else text
    return title, slides


def write_slides(root: Path, folder: Path) -> list[Path]:
    """Write a page of slides for each lab that has questions for the room, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, written = table_rows((root / "docs" / "room.md").read_text()), []
    for path in sorted((root / "notebooks" / "solved").glob("[0-9]*.ipynb")):
        lab = path.name.partition("_")[0].removeprefix("0")
        questions = {row[1]: row[2] for row in rows if row[0] == lab}
        if questions:
            title, slides = read_slides(json.loads(path.read_text()), questions)
            first = f"<section><h1>{inline(title)}</h1><div></div></section>"
            body = first + "".join(slide.as_html() for slide in slides)
            written.append(folder / f"{path.stem}.html")
            written[-1].write_text(PAGE.format(title=plain(title), slides=body))
    return written
