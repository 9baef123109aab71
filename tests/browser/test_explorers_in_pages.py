"""Explorers in a page without a kernel, opened from a folder without a network: their numbers are the kernel's."""

import shutil

import pytest

from docs.book import browser_python, explorers
from labkit_course import widgets

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
ANSWER_MS = 120_000
NAMES = ("RingExplorer", "HostsExplorer")
SCRIPT = '<script src="_static/explorers.js"></script>'
PAGE = '<!doctype html><html lang="en"><meta charset="utf-8"><title>x</title>' + SCRIPT + "{}"


@pytest.fixture(scope="module", params=["python", "positions"])
def folder(request, repository, tmp_path_factory):
    """A page with explorers, whose answers come from Python in the page or from a list."""
    files = browser_python.read_files() if request.param == "python" else None
    if request.param == "python" and files is None:
        pytest.skip("no Pyodide: make book fetches it")
    names = () if files else NAMES
    found = explorers.read_explorers(*names, every_position=files is None)
    folder = tmp_path_factory.mktemp(request.param)
    explorers.write_answers(found, files, folder / "_static" / "live")
    shutil.copy(repository / "docs/_static/explorers.js", folder / "_static")
    shown = "".join(explorers.as_html(each, has_python=files is not None) for each in found.values())
    (folder / "page.html").write_text(PAGE.format(shown))
    return folder


@pytest.fixture(scope="module")
def page(browser, folder):
    """One page for all tests, since Python takes half a minute to start in it."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto((folder / "page.html").as_uri())
    yield page
    assert page.errors == [] and [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


class Shown:
    """One explorer of the page."""

    def __init__(self, page, kind):
        """Begin with the values that it had when the page was opened."""
        self.kernel = kind()
        self.element = page.locator(".explorer", has_text=kind.title)
        self.element.get_by_role("button", name="reset").click()
        _, words = self.kernel.render_figure()
        self.element.locator(".explorer-words", has_text=words).wait_for(timeout=ANSWER_MS)

    def choose(self, **chosen):
        """Choose values, and wait for the answer to the last one."""
        for name, value in chosen.items():
            control = self.kernel.controls[name]
            box = self.element.get_by_label(control.label, exact=True)
            before = int(self.element.get_attribute("data-answered") or 0)
            if box.evaluate("each => each.localName") == "select":
                box.select_option(label=next(text for text, each in control.options if each == value))
            else:
                box.fill(str(value))
                box.press("Enter")
            self.element.page.wait_for_function(
                "([each, before]) => Number(each.dataset.answered) > before",
                arg=[self.element.element_handle(), before],
                timeout=ANSWER_MS,
            )
            self.kernel.chosen[name] = value

    def assert_equal(self):
        """Sentence, figure and numbers are those that the kernel's explorer has for these values."""
        _, words = self.kernel.render_figure()
        assert self.element.locator(".explorer-words").inner_text() == f"{words}."
        assert self.element.locator("svg").get_attribute("aria-label") == words
        rows = self.element.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
        )
        prediction = self.kernel.prediction.items()
        assert rows == [
            [name, next(iter(self.kernel.table_row(name, each, None).values()))] for name, each in prediction
        ]
        assert self.element.locator(".explorer-status").inner_text() == ""


def has_python(folder):
    return (folder / "_static/live/python.js").exists()


def test_the_ring_is_the_kernels_for_chosen_values(page):
    ring = Shown(page, widgets.RingExplorer)
    ring.assert_equal()
    for chosen in ({"ranks": 64, "size": 2**24}, {"messages": 64}, {"latency_us": 1, "gb_per_s": 450}):
        ring.choose(**chosen)
        ring.assert_equal()
    ring.element.get_by_role("button", name="reset").click()
    page.wait_for_function("document.querySelector('.explorer-words').textContent.startsWith('6 steps')")
    ring.kernel = widgets.RingExplorer()
    ring.assert_equal()


def test_numbers_are_also_in_the_figure(page):
    ring = Shown(page, widgets.RingExplorer)
    ring.choose(ranks=8, size=2**30)
    by_ranks = {
        ranks: widgets.RingExplorer().predict(**ring.kernel.chosen | {"ranks": ranks}) for ranks in (2, 4, 8, 64)
    }
    texts = ring.element.locator("svg text").all_text_contents()
    for predicted in by_ranks.values():
        assert f"  {predicted['all_reduce_ms']:,.0f}" in texts, texts


def test_another_explorer_of_the_page_is_the_kernels_too(page):
    hosts = Shown(page, widgets.HostsExplorer)
    hosts.choose(hosts=128, cards=8, tokens=1024, way="fsdp")
    hosts.assert_equal()


def test_steps_and_two_axes_are_the_kernels(page, folder):
    if not has_python(folder):
        pytest.skip("a list of so many positions takes long to write")
    step = Shown(page, widgets.StepExplorer)
    step.choose(gpus=64, tokens=8192, share=0.25)
    step.assert_equal()
    axes = Shown(page, widgets.TwoAxesExplorer)
    axes.choose(ranks=64, tp=8, overlap=True)
    axes.assert_equal()
    axes.choose(ranks=8)
    axes.choose(tp=16)
    with pytest.raises(ValueError, match="cannot share") as refused:
        axes.kernel.predict(**axes.kernel.chosen)
    assert axes.element.locator(".explorer-status").inner_text() == str(refused.value)
    axes.choose(tp=2)
    axes.assert_equal()


def test_any_number_may_be_typed_in(page, folder):
    if not has_python(folder):
        pytest.skip("a list has the values of the buttons alone")
    ring = Shown(page, widgets.RingExplorer)
    ring.choose(latency_us=37.5, messages=5, gb_per_s=3)
    ring.assert_equal()
    ring.choose(messages=1.5)
    assert "take a whole number from 1 to 10,000" in ring.element.locator(".explorer-status").inner_text()
    ring.choose(messages="")
    assert "take a whole number" in ring.element.locator(".explorer-status").inner_text()
    ring.choose(messages=7)
    ring.assert_equal()
