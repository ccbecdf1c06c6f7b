"""The site (docs/site.py): links of pages become links of the site, every page is in the menu once, and what leads nowhere
is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ortmodule_site", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_pages(site: ModuleType, tmp_path: Path) -> None:
    guide = tmp_path / "guide" / "faq.md"

    def made(text: str) -> str:
        return site.page(text, guide, tmp_path)

    assert made("[m](../MEMORY.md#a), [t](../../tests/engine.py), [p](../pictures/profile.html)") == "[m](../MEMORY.md#a), t, [p](../pictures/profile.html)"
    assert made("see docs/MEMORY.md; docs/guide/limits.md.") == f"see [{site.title(DOCS / 'MEMORY.md')}](../MEMORY.md); [Limits](limits.md)."
    for kept in ("`docs/MEMORY.md`", "docs/NO_SUCH.md", "/usr/docs/MEMORY.md", "```\ndocs/MEMORY.md\n```\n", "[docs/MEMORY.md](https://x.y)"):
        assert made(kept) == kept
    assert site.page("[r](README.md) [q](docs/guide/quickstart.md)", tmp_path / "index.md", tmp_path) == "[r](index.md) [q](guide/quickstart.md)"


def test_every_page_is_in_the_menu_once(site: ModuleType) -> None:
    lines = site.menu(sorted(p.stem for p in DOCS.glob("*.md")))
    pages = [line.rpartition(": ")[2] for line in lines if line.endswith(".md")]
    there = {str(p.relative_to(DOCS)) for p in (*DOCS.glob("*.md"), *DOCS.glob("guide/*.md"))}
    assert len(pages) == len(set(pages)) and set(pages) == there | {"index.md", "reference.md"}


def test_links_that_lead_nowhere_are_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#x">b</a><a href="#top">t</a><a href="https://x.y">x</a><img src="p.png">')
    (tmp_path / "b.html").write_text('<p id="x"><a href="a.html#no">a</a><a href="c.html">c</a><link href="s.css?v=1">')
    (tmp_path / "s.css").write_text("")
    assert sorted(site.broken(tmp_path)) == ["a.html: p.png", "b.html: a.html#no", "b.html: c.html"]
