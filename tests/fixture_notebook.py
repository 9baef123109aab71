"""What the tests of cells in JupyterLab share: press Shift+Enter, and read what a cell shows."""

import re
from typing import Any

LONG_MS = 40_000


def press(page: Any, number: int) -> Any:
    """Press Shift+Enter in a cell until it is taken; the cell."""
    from playwright.sync_api import expect

    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    for _ in range(10):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        try:
            expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[(\*|\d+)\]:"), timeout=2000)
            return cell
        except AssertionError:  # for a moment after its start the page loses keys
            continue
    raise AssertionError(f"cell {number} was never executed")


def output_of(page: Any, number: int) -> str:
    """Run a cell, and wait for its end; what it shows."""
    from playwright.sync_api import expect

    cell = press(page, number)
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"), timeout=LONG_MS)
    page.wait_for_timeout(300)  # what the kernel has sent is drawn
    return str(cell.locator(".jp-Cell-outputArea").inner_text())
