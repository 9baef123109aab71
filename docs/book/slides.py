"""Slides of a lab from its solved notebook: one a section, with script, figures, takeaway and question for the room."""

import base64
import html
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from docs.book.labs import CAPTION, plain, text_of
from docs.book.plans import table_rows

HEADING = re.compile(r"^## (\d+)\. ([^\n]+?)(?: \(\d+ minutes?\))?$", re.MULTILINE)
FOLD = re.compile(r"<details>.*?</details>", re.DOTALL)
POINT = re.compile(r"^(?:\d+\.|-) (.+(?:\n +\S.*)*)", re.MULTILINE)
TAKEAWAY = re.compile(r"^\*Takeaway: (.+?)\*$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|.*\|$(?:\n^\|.*\|$)+", re.MULTILINE)
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Of a slide, in units of its letters: 1.8 hundredths of its width.
WIDTH, HEIGHT, LETTER, LINE = 50.0, 21.0, 0.605, 1.3
# Beside a figure, code has this share of the width.
BESIDE = 0.64
MAX_POINTS, MAX_CODE_LINES, MAX_SAID_LINES, MAX_LETTERS = 5, 30, 10, 90
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
html {{ scroll-snap-type: y mandatory; font: 1.8vw/1.35 sans-serif; color: #222; background: #fff; }}
body {{ margin: 0; }}
section {{ height: 100vh; box-sizing: border-box; padding: 3vh 5vw; scroll-snap-align: start; overflow: hidden;
  display: flex; flex-direction: column; gap: 1.5vh; break-after: page; }}
h1 {{ font-size: 2.2em; margin: auto 0; line-height: 1.2; }}
h2 {{ font-size: 1.4em; margin: 0; }} p, ul {{ margin: 0; }}
ul {{ font-size: 1.1em; }}
.shown {{ flex: 1; min-height: 0; display: grid; gap: 1em; align-items: center; justify-items: center;
  grid-auto-rows: minmax(0, 1fr); }}
img {{ width: 100%; height: 100%; min-width: 0; min-height: 0; object-fit: contain; }}
pre {{ line-height: {line}; margin: 0; }} pre.said {{ border-left: .2em solid #888; padding-left: .8em; }}
li {{ margin: .4em 0; }} table {{ border-collapse: collapse; font-size: .8em; }}
th, td {{ padding: .25em .7em; border-bottom: 1px solid #999; text-align: left; }}
.take {{ font-weight: bold; }} .ask {{ color: #06c; }} .statement .take, .statement .ask {{ font-size: 1.5em; }}
.statement {{ justify-content: center; gap: 5vh; }} .statement h2 {{ margin-bottom: auto; }}
.statement p:last-child {{ margin-bottom: auto; }}
@page {{ size: 16in 9in; margin: 0; }}
@media print {{ html {{ font-size: .288in; }} section {{ height: 9in; padding: .27in .8in; gap: .135in; }}
  section:last-of-type {{ break-after: auto; }} }}
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
    figures: list[tuple[str, str]] = field(default_factory=list)
    """PNG in base64, and the figure's caption."""
    # The rest is shown where there is neither a script nor a figure: the first of these that the section has.
    points: list[str] = field(default_factory=list)
    fenced: str = ""
    table: str = ""
    cell: tuple[str, str] = ("", "")
    """The section's first cell that starts ranks, and what these printed."""

    def as_html(self) -> str:
        """The slide as a section of the page."""
        shown = self.shown_html()
        last = f'<p class="take">{inline(sentence(self.takeaway))}</p>' * bool(self.takeaway)
        last += f'<p class="ask">{inline(self.question)}</p>' * bool(self.question)
        kind = "" if shown else ' class="statement"'
        return f"<section{kind}><h2>{inline(self.title)}</h2>{shown}{last}</section>"

    def shown_html(self) -> str:
        """What there is to see; "" where the words are all."""
        images = [f'<img src="data:image/png;base64,{png}" alt="{html.escape(alt)}">' for png, alt in self.figures]
        if self.code and images:
            parts = [code_html(self.code, BESIDE * WIDTH), *images]
            return f'<div class="shown" style="grid-template-columns: auto 1fr">{"".join(parts)}</div>'
        if images:
            columns = best_columns([png_size(png) for png, _ in self.figures])
            style = f"grid-template-columns: repeat({columns}, minmax(0, 1fr))"
            return f'<div class="shown" style="{style}">{"".join(images)}</div>'
        code, said = (self.code, "") if self.code else self.cell
        if self.code:
            inner = code_html(code)
        elif self.points:
            inner = "<ul>" + "".join(f"<li>{inline(each)}</li>" for each in self.points[:MAX_POINTS]) + "</ul>"
        elif self.fenced:
            inner = code_html(self.fenced)
        elif self.table:
            inner = table_html(self.table)
        elif code:
            height = HEIGHT / 2 if said else HEIGHT
            inner = code_html(code, height=height) + (code_html(said, height=height, kind="said") if said else "")
        else:
            return ""
        return f'<div class="shown">{inner}</div>'


def code_html(code: str, width: float = WIDTH, height: float = HEIGHT, kind: str = "code") -> str:
    """Code in letters as large as its place allows, and no larger than the other text."""
    lines = code.rstrip().split("\n")
    size = min(1.0, width / (LETTER * max(map(len, lines))), height / (LINE * len(lines)))
    return f'<pre class="{kind}" style="font-size: {size:.2f}em">{html.escape(code.rstrip())}</pre>'


def table_html(markdown: str) -> str:
    """A table of Markdown."""
    head, *rows = table_rows(markdown)
    # A table of Markdown has a head even where there is nothing to say in it.
    is_said = re.search(r"\w", " ".join(head))
    cells = [f"<tr>{''.join(f'<th>{inline(each)}</th>' for each in head)}</tr>"] if is_said else []
    cells += [f"<tr>{''.join(f'<td>{inline(each)}</td>' for each in row)}</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


def png_size(png: str) -> tuple[int, int]:
    """Width and height of a PNG in base64, which stand at its beginning."""
    head = base64.b64decode(png[:44])
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def best_columns(sizes: list[tuple[int, int]]) -> int:
    """In how many columns figures of these sizes are drawn largest."""

    def scale(columns: int) -> float:
        width, height = WIDTH / columns, HEIGHT / -(-len(sizes) // columns)
        return min(min(width / wide, height / high) for wide, high in sizes)

    return max(range(1, len(sizes) + 1), key=scale)


def sentence(text: str) -> str:
    """A takeaway as a sentence of its own; what begins with code or with a letter's name stays."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]{2}|a ", text) else text


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
                    add_prose(slides[-1], FOLD.sub("", piece))
            continue
        pictures = [output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
        after = [text_of(each) for each in cells[place + 1 : place + 4] if each["cell_type"] == "markdown"]
        caption = next(filter(None, map(CAPTION.match, after)), None)
        shows = plain(caption[1]) if caption else f"The figure of section {slides[-1].title}" if slides else ""
        if slides:
            slides[-1].figures += [("".join(each).strip(), shows) for each in pictures]
            if "script" in cell["metadata"].get("tags", []):
                slides[-1].code = text.partition("\n")[2] if text.startswith("%%") else text
            elif text.startswith("%%torchrun") and not slides[-1].cell[0] and text.count("\n") < MAX_CODE_LINES:
                slides[-1].cell = text, said_by_ranks(cell)
    return title, slides


def add_prose(slide: Slide, text: str) -> None:
    """Add to a slide what a piece of its section's prose has: a list, code, a table, the takeaway."""
    slide.points += [point for point in POINT.findall(text) if "://" not in point]
    slide.fenced = slide.fenced or "\n".join(FENCED.findall(text)[:1])
    slide.table = slide.table or "\n".join(TABLE.findall(text)[:1])
    if taken := TAKEAWAY.search(text):
        slide.takeaway = taken[1]


def said_by_ranks(cell: dict) -> str:
    """The first lines that a cell's ranks printed."""
    printed = "".join("".join(each["text"]) for each in cell["outputs"] if each["output_type"] == "stream")
    # A slide has no room for PyTorch's warnings.
    lines = [line for line in printed.strip("\n").split("\n") if not re.search(r"\[W\d{4} ", line)]
    lines = [line if len(line) <= MAX_LETTERS else f"{line[:MAX_LETTERS]} …" for line in lines]
    return "\n".join(lines[:MAX_SAID_LINES] + ["…"] * (len(lines) > MAX_SAID_LINES))


def write_slides(root: Path, folder: Path) -> list[Path]:
    """Write a page of slides for each lab that has questions for the room, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, written = table_rows((root / "docs" / "room.md").read_text()), []
    for path in sorted((root / "notebooks" / "solved").glob("[0-9]*.ipynb")):
        lab = path.name.partition("_")[0].removeprefix("0")
        questions = {row[1]: row[2] for row in rows if row[0] == lab}
        if questions:
            title, slides = read_slides(json.loads(path.read_text()), questions)
            first = f"<section><h1>{inline(title)}</h1></section>"
            body = first + "".join(slide.as_html() for slide in slides)
            written.append(folder / f"{path.stem}.html")
            written[-1].write_text(PAGE.format(title=plain(title), slides=body, line=LINE))
    return written


def find_chromium() -> str | None:
    """Return the browser that prints slides, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def print_slides(pages: list[Path], chromium: str) -> list[Path]:
    """Print pages of slides as PDF beside them, each slide on a page of its own."""
    # A part of labkit[dev], which a package on an index could lack.
    from playwright.sync_api import sync_playwright

    written = [path.with_suffix(".pdf") for path in pages]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        for path, pdf in zip(pages, written, strict=True):
            page.goto(path.resolve().as_uri())
            page.pdf(path=pdf, prefer_css_page_size=True, print_background=True)
        browser.close()
    return written
