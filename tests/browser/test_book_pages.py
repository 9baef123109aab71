"""The whole book: built without a warning, read from its folder without a network, by keyboard, eye and ear."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]
MAX_S, MAX_MIB = 120, 40
PAGES = (
    "index.html",
    "labs/00_ranks.html",
    "labs/02_fsdp_wrapping.html",
    "formulas.html",
    "troubleshooting.html",
    "api/theory.html",
)


@pytest.fixture(scope="module")
def book(repository, tmp_path_factory):
    """The folder of the book, built as ``make book`` does, and the seconds that it took."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("no Sphinx: make book installs it")
    folder = tmp_path_factory.mktemp("book") / "book"
    begun = time.monotonic()
    # Nothing may be fetched: a proxy that nobody answers for.
    closed = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    command = [sys.executable, "-m", "docs.book", str(folder)]
    done = subprocess.run(command, cwd=repository, env=os.environ | closed, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, time.monotonic() - begun


class Links(HTMLParser):
    """What a page links to or loads, and its anchors."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        loads = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
        if given.get(loads.get(tag)) and given.get("rel") not in (
            "canonical",
            "search",
            "author",
            "index",
            "next",
            "prev",
        ):
            self.loaded.append(given[loads[tag]])


def test_the_book_is_built_in_two_minutes_and_not_too_large(book):
    folder, took_s = book
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert took_s <= MAX_S and size <= MAX_MIB * 2**20


def test_no_link_leads_nowhere_and_nothing_comes_from_elsewhere(book):
    folder, _ = book
    read = {path: Links(path) for path in folder.rglob("*.html")}
    dead, outside, count = [], [], 0
    for path, page in read.items():
        outside += [(path.name, each) for each in page.loaded if re.match(r"(https?:)?//", each)]
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = read[target].anchors if target in read else {unquote(parts.fragment)}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append((str(path.relative_to(folder)), link))
    assert count > 1000 and dead == [] and outside == []
    styles = [
        path for path in folder.rglob("*.css") if re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text())
    ]
    assert styles == []


@pytest.fixture
def open_page(browser, book):
    """Opens a page from the folder, without a network; what it asks for and what goes wrong is kept."""
    contexts = []

    def open_it(name, *, width=1280, scheme="light", query=""):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto((book[0] / name).as_uri() + query)
        return page

    yield open_it
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_six_pages_are_readable_by_all(name, width, scheme, open_page, screenshots):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install 'labkit[dev]'")
    page = open_page(name, width=width, scheme=scheme)
    page.screenshot(path=screenshots / f"book_{Path(name).stem}_{width}_{scheme}.png")
    # The page itself never scrolls sideways: what is wider has a place of its own that does.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # To open all is to judge all.
    page.evaluate("document.querySelectorAll('article details').forEach(each => each.open = true)")
    found = axe.Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == [], [
        (each["id"], node["html"][:200], node.get("failureSummary")) for each in found for node in each["nodes"][:3]
    ]
    assert page.errors == [] and [url for url in page.asked if not url.startswith(("file:", "data:"))] == []


def test_the_search_finds_a_page_by_its_words(open_page):
    page = open_page("search.html", query="?q=straggler")
    page.locator("#search-results li a").first.wait_for(timeout=10_000)
    names = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert any("07" in name or "glossary" in name for name in names), names
    assert page.errors == []


def test_a_pasted_message_is_found_and_others_are_hidden(open_page, screenshots):
    page = open_page("troubleshooting.html")
    everything = page.locator("ul.messages > li:visible").count()
    page.locator("#message").fill("ValueError: 4 ranks cannot share width 510: 510 % 4 = 2")
    left = page.locator("ul.messages > li:visible")
    assert everything > 300 and 1 <= left.count() < 40
    assert "ranks cannot share" in page.locator("ul.messages > li.best").first.inner_text()
    assert page.locator("ul.messages > li.best").first.bounding_box()["y"] < 900, "in sight of the box"
    assert "like it" in page.locator("#message-answer").inner_text()
    page.screenshot(path=screenshots / "book_message.png")
    page.locator("#message").fill("")
    assert page.locator("ul.messages > li:visible").count() == everything


def test_an_answer_is_folded_until_it_is_opened(open_page):
    page = open_page("labs/02_fsdp_wrapping.html")
    answer = page.locator("details", has=page.get_by_text("Show the answer")).first
    code = answer.locator("pre").first
    assert not code.is_visible()
    answer.locator("summary").click()
    assert code.is_visible()


def test_an_explorer_works_in_its_lab(open_page, screenshots):
    page = open_page("labs/00_ranks.html")
    ring = page.locator(".explorer")
    ring.get_by_label("ranks", exact=True).select_option("64")
    page.wait_for_function("document.querySelector('.explorer').dataset.answered === '1'", timeout=120_000)
    assert ring.locator(".explorer-words").inner_text().startswith("126 steps of 10 µs")
    ring.screenshot(path=screenshots / "book_explorer.png")
    assert page.errors == [] and [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))] == []


# Of each slide: what is cut off at an edge, what covers the part above it, what is empty, what is too small to read.
BAD_SLIDES = """() => [...document.querySelectorAll("section")].map((slide, number) => {
  const frame = slide.getBoundingClientRect();
  const cut = [...slide.querySelectorAll("h1, h2, p, li, pre, img")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.bottom > frame.bottom + 1 || box.right > frame.right + 1 || box.left < frame.left - 1;
  });
  const parts = [...slide.children].map((each) => each.getBoundingClientRect()).filter((box) => box.height);
  const covered = parts.filter((box, place) => place && box.top < parts[place - 1].bottom - 1);
  const squeezed = [...slide.querySelectorAll("div")].filter((each) => each.scrollHeight > each.clientHeight + 1);
  const words = slide.matches(".statement") ? ".take, .ask" : "pre, img, li, table";
  const empty = number && !slide.querySelector(words);
  const small = [...slide.querySelectorAll("img, pre")].filter((each) => {
    const box = each.getBoundingClientRect();
    if (each.localName === "pre") return parseFloat(getComputedStyle(each).fontSize) < frame.width / 120;
    const scale = Math.min(box.width / each.naturalWidth, box.height / each.naturalHeight);
    return Math.max(each.naturalWidth * scale / frame.width, each.naturalHeight * scale / frame.height) < 0.3;
  });
  return [slide.innerText.slice(0, 40), cut.length, covered.length, squeezed.length, Number(empty), small.length];
}).filter(([, ...wrong]) => wrong.some(Boolean))"""


def test_every_slide_fits_its_page_and_has_a_page_of_the_pdf(open_page, book):
    decks = sorted(path.name for path in (book[0] / "slides").glob("*.html"))
    assert len(decks) == 7
    for name in decks:
        page = open_page(f"slides/{name}")
        page.set_viewport_size({"width": 1280, "height": 720})
        assert page.evaluate(BAD_SLIDES) == [], name
        printed = (book[0] / "slides" / name).with_suffix(".pdf").read_bytes()
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == page.locator("section").count(), name


def test_formulas_are_drawn_without_a_library(open_page):
    page = open_page("formulas.html")
    assert page.locator("math").count() > 40 and page.locator("article .math").first.is_visible()
    assert page.locator("math mfrac").first.bounding_box()["height"] > 20


def test_dark_mode_is_chosen_by_a_button(open_page):
    page = open_page("index.html")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for _ in range(3):  # auto, light, dark
        page.locator("button.theme-toggle:visible").first.click()
        if page.evaluate("getComputedStyle(document.body).backgroundColor") != before:
            return
    raise AssertionError("no click made the page dark")
