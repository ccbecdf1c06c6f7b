"""The documents: every Python block of a page runs, in order, in one process a page, and prints what stands below it; no
link leads nowhere.

A block fenced as `python` runs unless the line before it is a comment `<!-- not run: why -->`, or `<!-- needs: name -->`
and there is no module of that name here. One fenced as `output` is what the block before it prints; `...` stands for
anything. A comment `<!-- first`, code, `-->` runs and is not shown: what a fragment takes for granted. Guides have none,
since people paste all of their blocks.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_CODE = re.compile(r"^(?:```(?P<kind>\w*)\n(?P<body>.*?)^```|<!-- first\n(?P<first>.*?)^-->)$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_RUNNER = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
printed = []
for number, code in enumerate(json.load(sys.stdin)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"block {number}", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def blocks(text: str) -> list[tuple[str, str | None]]:
    """(code, what it prints)"""
    found: list[tuple[str, str | None]] = []
    ran = False
    for m in _CODE.finditer(text):
        kind, body = m["kind"], m["body"]
        if m["first"] is not None:
            found.append((m["first"], None))
        elif kind == "python":
            before = text[: m.start()].rstrip("\n").rpartition("\n")[2]
            needs = re.match(r"<!-- needs: (\w+) -->", before)
            ran = not before.startswith("<!-- not run: ") and (needs is None or find_spec(needs[1]) is not None)
            if ran:
                found.append((body, None))
        elif kind == "output" and ran:
            found[-1] = found[-1][0], body
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_what_a_guide_says(page: Path, tmp_path: Path) -> None:
    assert "<!-- first" not in page.read_text()
    parts = blocks(page.read_text())
    if not parts:
        pytest.skip("a page without code")
    run(parts, tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if p not in GUIDES and blocks(p.read_text())], ids=lambda p: p.stem)
def test_what_another_page_says(page: Path, tmp_path: Path) -> None:
    run(blocks(page.read_text()), tmp_path)


def run(parts: list[tuple[str, str | None]], tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    res = subprocess.run([sys.executable, "-c", _RUNNER], input=json.dumps([code for code, _ in parts]), capture_output=True, text=True,
                         cwd=tmp_path, env=env, timeout=600, check=False)  # fmt: skip
    assert res.returncode == 0, res.stderr[-3000:]
    check = doctest.OutputChecker()
    for (code, want), got in zip(parts, json.loads(res.stdout.splitlines()[-1]), strict=True):
        if want is not None:
            assert check.check_output(want, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), f"{code}\nprinted\n{got}\nand not\n{want}"


def anchors(text: str) -> set[str]:
    text = _FENCE.sub("", text)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*?)\s*$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{page.name}: {target}"


def test_what_is_not_shown_runs_first() -> None:
    assert blocks("<!-- first\nx = 1\n-->\n```python\nprint(x)\n```\n```sh\nls\n```\n") == [("x = 1\n", None), ("print(x)\n", None)]


def test_what_is_not_run_says_why() -> None:
    assert blocks("<!-- not run: needs a GPU -->\n```python\n1/0\n```\n```output\n2\n```\n```python\nprint(1)\n```\n```output\n1\n```\n") == [("print(1)\n", "1\n")]
