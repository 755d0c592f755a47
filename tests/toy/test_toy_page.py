"""The interactive toy page in a headless Chromium: its numbers equal those of Python."""

import re
from contextlib import contextmanager

import pytest
from browsing import TIMEOUT, needs_browser

from wsam.toy import RULES, Setting, trace
from wsam.toy.page import toy_page

SETTINGS = [
    Setting(rule="coupled_wsam", gamma=0.95),
    Setting(rule="sam"),
    Setting(rule="sgd", momentum=0.5, lr=8.0),
    Setting(rule="wsam", gamma=0.6),
    Setting(rule="wsam", gamma=0.98, lr=2.0, steps=40),
    Setting(rule="gsam", rho=3.5, steps=60),
    Setting(rule="coupled_wsam", gamma=0.9, geometry="adaptive", rho=0.1),
    Setting(rule="wsam", gamma=0.8, geometry="fisher", momentum=0.0),
    Setting(rule="gsam", alpha=0.5, geometry="fisher", rho=1.0, steps=80),
]


def test_page_is_self_contained():
    page = toy_page()
    assert not re.search(r"https?:|<link|src=|@import|{[{%#]", page)
    assert len(page) < 60_000


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "toy.html"
    path.write_text(toy_page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    """Open the page in a new window; fail on any script error or other request."""
    with watched(browser, address) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def one_page(browser, address):
    with watched(browser, address) as open_page:
        yield open_page()


@contextmanager
def watched(browser, address):
    contexts, wrong = [], []

    def open_page(**options):
        context = browser.new_context(offline=True, **options)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: wrong.append(r.url) if r.url != address else None)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def choose(page, setting):
    """Set every control of the page."""
    page.locator(f"input[name=rule][value={setting.rule}]").check(force=True)
    page.locator(f"input[name=geometry][value={setting.geometry}]").check(force=True)
    for name in ("gamma", "rho", "lr", "momentum", "alpha", "steps"):
        page.locator(f"#{name}").fill(f"{getattr(setting, name):g}")


def light_corner(page):
    """Return whether the upper left corner of the map, where the loss is high, is light."""
    pixel = "document.getElementById('map').getContext('2d').getImageData(5, 5, 1, 1).data"
    return sum(page.evaluate(f"Array.from({pixel})")[:3]) > 3 * 128


@needs_browser
@pytest.mark.browser
class TestPage:
    @pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.rule}-{s.geometry}-{s.gamma}")
    def test_end_point_equals_that_of_python(self, one_page, setting):
        page, run = one_page, trace(setting)
        choose(page, setting)
        assert run.decimals >= 3, "the setting must have reproducible digits"
        assert page.inner_text("#end") == run.end_text
        assert page.inner_text("#loss") == run.loss_text
        assert page.inner_text("#eigenvalues") == run.eigenvalues_text
        where = f"ends at the {run.minimum} minimum" if run.minimum else "is at neither minimum"
        assert page.inner_text("#verdict") == f"{RULES[setting.rule]} {where}"

    def test_slider_moves_the_end_point(self, opened):
        page = opened()
        choose(page, Setting(rule="coupled_wsam", gamma=0.95))
        before = page.inner_text("#end")
        page.locator("#gamma").focus()
        for _ in range(5):
            page.keyboard.press("ArrowLeft")
        assert page.inner_text("#gamma-value") == "0.9"
        after = page.inner_text("#end")
        assert after != before
        assert after == trace(rule="coupled_wsam", gamma=0.9).end_text

    def test_slider_dragged_by_mouse(self, opened):
        page = opened()
        choose(page, Setting(rule="sam"))
        box = page.locator("#rho").bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.3, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.1, middle, steps=3)
        page.mouse.up()
        rho = float(page.inner_text("#rho-value"))
        assert 0.05 <= rho < 1.5
        assert page.inner_text("#end") == trace(rule="sam", rho=rho).end_text

    def test_chaotic_run_shows_only_reproducible_digits(self, opened):
        page, run = opened(), trace(rule="wsam", gamma=0.95)
        page.click("[data-preset=paper95]")
        shown = page.inner_text("#end")
        assert "±" in shown
        assert "±" in run.end_text
        mu, sigma, spread = (float(x) for x in re.findall(r"-?[\d.]+", shown))
        assert spread > 0.1
        assert (mu, sigma) == pytest.approx(run.end, abs=2.5)
        assert page.inner_text("#verdict") == "WSAM ends at the sharp minimum"
        assert "oscillates chaotically" in page.inner_text("#note")
        assert page.inner_text("#loss") == run.loss_text == "0.28"
        for text in (page.inner_text("#eigenvalues"), run.eigenvalues_text):
            assert re.fullmatch(r"2, [45] ± (0\.\d|1)", text)

    def test_tap_on_the_map_moves_the_start(self, opened):
        page = opened()
        page.click("[data-preset=coupled95]")
        box = page.locator("#map").bounding_box()
        page.locator("#map").click(position={"x": box["width"] * 0.8, "y": box["height"] * 0.6})
        start = tuple(page.evaluate("setting.start"))
        assert start == pytest.approx((-33 + 0.8 * 66, 41 - 0.6 * 38), abs=0.2)
        assert page.inner_text("#end") == trace(rule="coupled_wsam", start=start).end_text

    def test_leaving_the_domain_is_reported(self, opened):
        page = opened()
        choose(page, Setting(rule="sam", geometry="adaptive", rho=2.0))
        assert page.inner_text("#end") == "left the domain"
        assert "try ρ between" in page.inner_text("#note")

    def test_weight_of_sharpness_is_the_effective_one(self, opened):
        page = opened()
        choose(page, Setting(rule="wsam", gamma=0.95, momentum=0.9))
        assert page.inner_text("#weight") == "1.9 (k = 19)"
        choose(page, Setting(rule="coupled_wsam", gamma=0.5))
        assert page.inner_text("#weight") == "1"

    def test_light_and_dark(self, opened):
        colors = {}
        for scheme in ("light", "dark"):
            page = opened(color_scheme=scheme)
            colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert light_corner(page) == (scheme == "light")
            page.click("#theme")
            assert light_corner(page) == (scheme == "dark")
        assert colors["light"] != colors["dark"]

    def test_readable_on_a_phone(self, opened):
        phone = {"width": 360, "height": 740}
        page = opened(viewport=phone, is_mobile=True, has_touch=True, device_scale_factor=2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for box in page.locator("button, fieldset span").all():
            assert box.bounding_box()["height"] >= 40
        texts = page.locator("p, dd, label").all()
        assert (
            min(text.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") for text in texts)
            >= 13
        )
        page.locator("#momentum").scroll_into_view_if_needed()
        assert page.locator("#map").bounding_box()["y"] >= 0, "the map stays visible"

    def test_all_methods_are_drawn_and_replayed(self, opened):
        page = opened()
        picture = "document.getElementById('map').toDataURL()"
        alone = page.evaluate(picture)
        page.check("#compare")
        assert page.evaluate(picture) != alone
        page.clock.install(time=0)  # a fake clock: a slow browser could miss the replay
        page.clock.pause_at(1000)
        page.click("#play")
        page.clock.run_for(1000)
        assert page.evaluate("0 < shown.upTo && shown.upTo < shown.points.length")
        page.clock.run_for(2000)
        assert page.evaluate("shown.upTo === shown.points.length")
