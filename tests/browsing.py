"""A headless Chromium for tests of self-contained pages."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}
TIMEOUT = 120_000
"""Timeout in milliseconds. Generous, because the machine may be busy."""
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@contextmanager
def running():
    """Yield a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=TIMEOUT
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, **options):
    """Open a file in a new window; fail on any error, dialog or other request."""
    address, wrong = path.as_uri(), []
    context = browser.new_context(offline=True, **options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("request", lambda r: wrong.append(r.url) if r.url != address else None)
    page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
    page.goto(address)
    yield page
    context.close()
    assert wrong == []
