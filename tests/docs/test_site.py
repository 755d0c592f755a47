"""The built site in a browser: copy buttons, cards, phones, and no request to another host."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import PHONE, needs_browser, running

pytestmark = [pytest.mark.browser, needs_browser]
ROOT = Path(__file__).parents[2]
SAMPLE = """---
orphan: true
---

# Sample

```console
$ wsam train --data digits \\
    --method wsam
error 3.62
$ wsam report runs
```

```py
>>> for i in range(2):
...     print(i)
0
1
```

```text
d = rho g0 / norm(g0)
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a copy of the checkout, with a page of samples; the gallery is not run."""
    root = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("_build", "gallery")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=ignored)
    shutil.copytree(ROOT / "examples", root / "examples")
    for name in ("src", "results", "benchmarks"):
        (root / name).symlink_to(ROOT / name)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):  # links in them are relative
        shutil.copy(ROOT / name, root / name)
    (root / "docs" / "sample.md").write_text(SAMPLE)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-D", "plot_gallery=0", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", "html"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return root / "html"


@pytest.fixture(scope="module")
def browser(site: Path):
    with running() as started:
        yield started


@pytest.fixture
def window(browser):
    """Open a page by its path; fail on errors of scripts and on requests to other hosts."""
    wrong: list[str] = []
    contexts = []

    def open_page(path: Path, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def copied(page, number: int) -> str:
    """Press a copy button and return the copied text."""
    page.evaluate(
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value })"
    )
    button = page.locator("button.copybtn").nth(number)
    button.dispatch_event("click")
    return page.evaluate("window.copied")


def test_copy_buttons_leave_out_prompts_and_outputs(site: Path, window) -> None:
    page = window(site / "sample.html")
    page.wait_for_selector("button.copybtn", state="attached")
    assert page.locator("button.copybtn").count() == 2, "formulas have no button"
    commands = "wsam train --data digits \\\n    --method wsam\nwsam report runs"
    assert copied(page, 0).strip() == commands
    assert copied(page, 1).strip() == "for i in range(2):\n    print(i)"


def test_copy_button_copies_the_first_example(site: Path, window) -> None:
    page = window(site / "index.html")
    page.wait_for_selector("button.copybtn", state="attached")
    assert copied(page, 0).startswith("pip install ")
    code = copied(page, 1)
    assert code.startswith("import torch\nimport wsam\n")
    compile(code, "index", "exec")


def test_landing_page_has_four_cards(site: Path, window) -> None:
    page = window(site / "index.html", viewport={"width": 1280, "height": 1000})
    titles = page.locator(".sd-card-title").all_inner_texts()
    assert titles == ["Use it", "Choose", "Measure", "Reproduce"]
    pages = {"quickstart", "methods", "compare", "paper"}
    first = {
        card.locator("a").first.get_attribute("href") for card in page.locator(".sd-card").all()
    }
    assert first == {f"{name}.html" for name in pages}


def test_pages_fit_a_phone_and_show_their_pictures(site: Path, window) -> None:
    skipped = {"genindex", "py-modindex", "search"}
    paths = [p for p in sorted(site.rglob("*.html")) if p.stem not in skipped]
    paths = [p for p in paths if "_modules" not in p.parts and "gallery" not in p.parts]
    assert len(paths) > 50
    page = window(site / "index.html", **PHONE)
    for path in paths:
        page.goto(path.as_uri())
        size = "[document.scrollingElement.scrollWidth, window.innerWidth]"
        wide, window_width = page.evaluate(size)
        assert wide <= window_width, path.name
        broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        assert page.evaluate(broken) == [], path.name


def test_code_in_tables_breaks_at_spaces_only(site: Path, window) -> None:
    """A wide table scrolls by itself on a phone; no word of its code continues on the next line."""
    page = window(site / "choosing.html", **PHONE)
    broken = page.evaluate("""() => {
        const found = [];
        for (const code of document.querySelectorAll("td code")) {
            const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
                const node = walker.currentNode;
                for (const word of node.data.matchAll(/[\\w.=(]+/g)) {
                    const range = document.createRange();
                    range.setStart(node, word.index);
                    range.setEnd(node, word.index + word[0].length);
                    if (range.getClientRects().length > 1) found.push(word[0]);
                }
            }
        }
        return found;
    }""")
    assert page.locator("td code").count() > 3
    assert broken == []


def test_methods_show_their_arguments(site: Path, window) -> None:
    page = window(site / "methods" / "wsam.html")
    signature = page.locator("dt.sig").first.inner_text()
    assert "rho=0.05, gamma=None" in " ".join(signature.split())
    assert "*args" not in signature


def test_names_of_the_reference_are_links(site: Path, window) -> None:
    page = window(site / "api.html")
    link = page.locator("a[href='api/geometry.html#wsam.geometry.Adaptive']")
    link.first.click()
    assert "Adaptive" in page.locator(":target").inner_text()
