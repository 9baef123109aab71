"""A person points at a line of a compiled program that waits, or reaches it by Tab."""

from pathlib import Path

import pytest

from labkit import inductor

pytestmark = [pytest.mark.browser, pytest.mark.alone]

CODE = (Path(__file__).parent.parent / "data" / "ddp_coalesced.py.txt").read_text()
PLAIN = "rgba(0, 0, 0, 0)"


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 900, "height": 700})
    page.set_content(inductor.ProgramListing(CODE)._repr_html_())
    yield page
    page.close()


def marked(page):
    """Numbers of the lines whose background is not that of the page, by the class that marks them."""
    script = "rows => rows.map(row => [parseInt(row.textContent), getComputedStyle(row).backgroundColor])"
    rows = page.locator(".labkit-program > div").evaluate_all(script)
    found = {}
    for number, colour in rows:
        if colour != PLAIN:
            found.setdefault(colour, []).append(number)
    return list(found.values())


def test_pointing_at_a_wait_marks_its_request_and_what_hides_it(page, screenshots):
    assert marked(page) == []
    bucket = inductor.find_buckets(CODE)[1]
    expected = [
        [bucket.request.number],
        [line.number for line in bucket.hidden_by],
        [line.number for line in bucket.waits],
    ]
    page.locator(".waits-1").first.hover()
    assert marked(page) == expected == [[52], [56, 64], [70, 72, 74, 76]]
    page.screenshot(path=screenshots / "program_looked_at.png")
    page.mouse.move(5, 690)
    assert marked(page) == []


def test_the_keyboard_reaches_every_request_and_wait(page):
    seen = []
    for _ in range(3 + 8):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.title"))
        assert marked(page), "the row that has the focus marks its bucket"
    assert sum(title.startswith("bucket 1, asked for in line 52: 2 lines compute meanwhile") for title in seen) == 5
    assert sum("nothing computes meanwhile" in title for title in seen) == 4
