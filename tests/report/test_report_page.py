"""The page of `wsam report` in a browser: hostile text is inert, everything is readable."""

import re

import pytest
from browsing import PHONE, needs_browser, opened
from reporting import RESULTS, make_folder

from wsam.report import write


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    return write(make_folder(root), root / "report.html")[0]


@needs_browser
@pytest.mark.browser
class TestPage:
    def test_hostile_names_are_inert(self, browser, path):
        with opened(browser, path) as shown:
            assert shown.locator("script, img").count() == 0
            assert "<script>alert(1)</script>" in shown.inner_text("main")

    def test_readable_on_a_phone(self, browser, path):
        with opened(browser, path, **PHONE) as shown:
            assert shown.evaluate("document.documentElement.scrollWidth") <= 390
            sizes = shown.evaluate(
                "[...document.querySelectorAll('svg text')].map(e => "
                "parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"
            )
            assert min(sizes) >= 9
            wide = shown.evaluate(
                "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
            )
            assert wide, "a wide table scrolls inside its frame"

    def test_charts_stay_in_their_frames(self, browser, path):
        """No text or line extends beyond its chart, where it would be cut or overlap."""
        outside = """() => [...document.querySelectorAll('svg.chart')].flatMap(svg => {
            const f = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text, path, use')].filter(e => {
                if (e.closest('defs') || e.hasAttribute('clip-path')) return false;
                const b = e.getBoundingClientRect();
                return b.left < f.left - 3 || b.right > f.right + 3 || b.top < f.top - 3
                    || b.bottom > f.bottom + 3;
            }).map(e => svg.getAttribute('aria-label') + ': ' + e.outerHTML.slice(0, 80));
        })"""
        with opened(browser, path, viewport={"width": 1200, "height": 900}) as shown:
            assert shown.evaluate(outside) == []

    def test_the_papers_tables_fit(self, browser, tmp_path):
        write(RESULTS, tmp_path / "page.html")
        window = {"width": 1200, "height": 900}
        with opened(browser, tmp_path / "page.html", viewport=window) as shown:
            cut = (
                "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
            )
            assert max(shown.evaluate(cut)) == 0

    def test_light_and_dark(self, browser, path):
        colors = {}
        for scheme in ("light", "dark"):
            with opened(browser, path, color_scheme=scheme) as shown:
                ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
                ink = shown.evaluate("getComputedStyle(document.querySelector('h1')).color")
                line = shown.evaluate(
                    "getComputedStyle(document.querySelector('.chart path[style*=\"--wsam\"]')).stroke"
                )
                colors[scheme] = [ground, ink, line]
        brightness = {
            scheme: [sum(map(int, re.findall(r"\d+", color)[:3])) for color in found]
            for scheme, found in colors.items()
        }
        assert brightness["light"][0] > 650 > 150 > brightness["dark"][0]
        assert brightness["light"][1] < 150 < 600 < brightness["dark"][1]
        assert colors["light"][2] != colors["dark"][2]

    def test_commands_open(self, browser, path):
        with opened(browser, path) as shown:
            first = shown.locator("details").first
            assert not first.locator("pre").first.is_visible()
            first.locator("summary").click()
            assert first.locator("pre").first.inner_text().startswith("wsam train --data")
