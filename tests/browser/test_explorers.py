"""A learner in JupyterLab moves every control of every explorer, runs it on real ranks, cancels, and needs no mouse."""

import contextlib
import re
import statistics
import time

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from fixture_long import long_but
from fixture_processes import is_alive, wait_for
from fixture_speed import slowness
from playwright.sync_api import TimeoutError

from labkit_course import widgets

pytestmark = [pytest.mark.browser, pytest.mark.alone, pytest.mark.timeout(180)]
LONG_MS = 60_000
MOVES = 20
# Seconds that an overlay may take where a run waits in slow motion. Eight ranks need 4.5 s to start on
# two cores, and TwoAxesExplorer's two steps wait for 2 s each. HostsExplorer makes its two hosts first.
SLOW_MOTION_S = {"BucketExplorer": 6.0, "RingExplorer": 6.0, "TwoAxesExplorer": 15.0, "HostsExplorer": 6.0}
"""What a run may take of which people are to see each step, for up to a second, after a compiler has run."""
# Notes the time from an input to the first frame with another figure.
WATCH = """
output => {
    const spent = window.spent = [];
    let begun = 0;
    for (const kind of ["click", "change"])
        output.addEventListener(kind, () => { begun = performance.now(); }, true);
    let shown = output.querySelector("img").src;
    new MutationObserver(() => {
        const image = output.querySelector("img");
        if (!image || image.src === shown) return;
        shown = image.src;
        image.decode().then(() => requestAnimationFrame(() => spent.push(performance.now() - begun)));
    }).observe(output, {subtree: true, childList: true, attributes: true});
}
"""
# Cancels within the page, once progress is shown: a warm run of 0.2 s can be over before a click from outside.
RUN_AND_CANCEL = """
output => new Promise(done => {
    const button = name => [...output.querySelectorAll("button")].find(each => each.textContent.trim() === name);
    new MutationObserver((changes, observer) => {
        const cancel = button("cancel");
        if (!output.querySelector("progress") || !cancel) return;
        observer.disconnect();
        cancel.click();
        done();
    }).observe(output, {subtree: true, childList: true});
    button("run it").click();
})
"""


@pytest.fixture(scope="module")
def page(lab, open_notebook, run_all):
    """A notebook with a cell for each explorer, all executed."""
    sources = ["from labkit_course import widgets", *(f"widgets.{name}()" for name in widgets.__all__)]
    contents = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
    contents.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(contents, lab.folder / "explorers.ipynb")
    page = open_notebook("explorers.ipynb", height=1000)
    run_all(page)
    page.locator(".jp-OutputArea-output .widget-html img").nth(len(widgets.__all__) - 1).wait_for(timeout=LONG_MS)
    yield page
    page.close()


@pytest.fixture(params=widgets.__all__)
def explorer(page, request):
    """The output of one explorer's cell."""
    output = page.locator(".jp-CodeCell").nth(1 + widgets.__all__.index(request.param)).locator(".jp-OutputArea-output")
    output.scroll_into_view_if_needed()
    return output


def choose_what_runs(output, name):
    """Lab 8's explorer begins with hosts of eight GPUs, which are theory here, and says so beside its button."""
    if name == "HostsExplorer":
        gpus = output.locator(".widget-toggle-buttons", has_text="GPUs of a host")
        gpus.get_by_role("button", name="2", exact=True).click()
        output.locator("button:enabled", has_text="run it").wait_for()


def controls_of(output):
    """Every selection, and every group of buttons that sets a value."""
    return [*output.locator("select").all(), *output.locator(".widget-toggle-buttons").all()]


def move(control, number):
    """Set it to its next value by the keyboard, back after the last one; whether there was another one."""
    if control.evaluate("node => node.tagName") == "SELECT":
        count = control.locator("option").count()
        control.focus()
        control.press("ArrowDown" if number % (2 * count - 2) < count - 1 else "ArrowUp")
    else:
        others = control.locator("button:not(.mod-active)").all()
        others[number % len(others)].focus()
        others[number % len(others)].press("Enter")


@pytest.mark.parametrize("explorer", long_but(["GatherExplorer"], widgets.__all__), indirect=True)
def test_a_moved_control_redraws_the_figure_within_200_ms(page, explorer, request):
    handle = explorer.element_handle()
    page.evaluate(WATCH, handle)
    controls, slow = controls_of(explorer), [slowness()]
    for number in range(MOVES):
        figures = page.evaluate("window.spent.length")
        move(controls[number % len(controls)], number // len(controls))
        with contextlib.suppress(TimeoutError):  # this move does not change the figure
            page.wait_for_function("figures => window.spent.length > figures", arg=figures, timeout=300 * slow[0])
    spent = sorted(page.evaluate("window.spent"))
    slow.append(slowness())
    told = f"{len(spent)} figures, median {statistics.median(spent):.0f} ms, worst {spent[-1]:.0f}"
    print(request.node.name, told, f"on a machine {min(slow):.1f} to {max(slow):.1f} times slower than usual")
    assert len(spent) >= MOVES / 2, "or most moves changed nothing"
    # Of the quicker half, since what else the machine does makes single ones take a second.
    assert statistics.median(spent[: len(spent) // 2]) <= 200 * max(slow)
    explorer.get_by_role("button", name="reset").click()
    page.wait_for_timeout(500)


@pytest.mark.parametrize(
    "explorer",
    long_but(["PlacementExplorer"], widgets.__all__),
    indirect=True,
)
def test_run_it_lays_the_measurement_over_the_prediction(explorer, screenshots, request):
    name = re.search(r"\[(\w+)\]", request.node.name)[1]
    choose_what_runs(explorer, name)
    run_it = explorer.get_by_role("button", name="run it")
    took, slow = [], slowness()
    for _ in range(2):  # the first may be cold
        begun = time.monotonic()
        run_it.click()
        with contextlib.suppress(TimeoutError):  # a warm run of 0.2 s can be over before it is looked for
            explorer.locator("progress").wait_for(timeout=1000 * slow)
        explorer.locator("progress").wait_for(state="detached", timeout=LONG_MS)
        took.append(time.monotonic() - begun)
        assert "–" not in explorer.locator("table").inner_text()
    print(request.node.name, f"overlay after {took[1]:.1f} s")
    limit_s = SLOW_MOTION_S.get(name, 2.5) * max(slow, slowness())
    assert took[1] <= limit_s, "2 s are the aim, or what waiting in slow motion takes"
    explorer.screenshot(path=screenshots / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name)}.png")


def test_cancel_ends_the_run_and_leaves_no_process(explorer, lab, request):
    choose_what_runs(explorer, re.search(r"\[(\w+)\]", request.node.name)[1])
    before = set(lab.runs.glob("*"))
    explorer.evaluate(RUN_AND_CANCEL)
    explorer.get_by_text("cancelled: no process of the run is left").wait_for(timeout=LONG_MS)
    ids = [path for folder in set(lab.runs.glob("*")) - before for path in folder.glob("rank_*.pid")]
    ranks = [int(path.read_text().split()[0]) for path in ids]
    wait_for(lambda: not any(map(is_alive, ranks)), 5)


def test_no_serious_violation_and_every_control_has_a_name(page, explorer, request):
    explorer.evaluate("node => node.setAttribute('data-under-test', '')")
    found = Axe().run(page, context="[data-under-test]").response["violations"]
    explorer.evaluate("node => node.removeAttribute('data-under-test')")
    serious = [f"{each['id']}: {each['help']}" for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []


def test_every_control_is_reached_by_the_tab_key(page, explorer):
    wanted = explorer.locator("select:enabled, button:enabled, summary").count()
    explorer.locator("select, button").first.focus()
    reached = 1
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        inside = explorer.evaluate("node => node.contains(document.activeElement)")
        if not inside:
            break
        reached += 1
    assert reached == wanted
