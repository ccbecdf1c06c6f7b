"""The documents as a site: python docs/site.py OUT (make docs). MkDocs makes the pages, mkdocstrings the reference.

Links to files that are neither pages nor pictures (tests, sources) become text: the site stands alone. Names of pages
in the text (docs/MEMORY.md) become links. What is built is looked through: a link or picture that leads nowhere fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REFERENCE = {
    "ortmodule": ["ORTModule", "DebugOptions", "LogLevel", "FallbackPolicy", "Report", "wrap_blocks", "CaptureError"],
    "ortmodule.optim": ["FusedAdam", "FusedLAMB", "FusedSGD", "FP16_Optimizer", "DynamicLossScaler", "clip_grad_norm_"],
    "ortmodule.artifacts": ["generate_artifacts"],
    "ortmodule.api": ["CheckpointState", "Module", "Optimizer", "LinearLRScheduler"],
}
GUIDES = [
    "quickstart", "trainers", "checkpoints", "mixed-precision", "custom-functions", "debugging", "from-torch-compile",
    "examples", "faq", "limits",
]  # fmt: skip
CONFIG = """site_name: ortmodule
docs_dir: {src}
site_dir: {site}
use_directory_urls: false
theme: readthedocs
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [{root}]
          options: {{show_source: false, heading_level: 3, show_root_heading: true, show_root_full_path: false}}
extra_css: [style.css]
markdown_extensions: [sane_lists]
nav:
{nav}
"""
SECTIONS = {  # the others are under Inside
    "Coming from": ["MIGRATION", "COMPATIBILITY", "guide/from-torch-compile"],
    "Using it": ["MEMORY", "OPTIMIZERS", "SPARSITY", "DISTRIBUTED", "ON_DEVICE", "SETTINGS", "LOOKING_IN"],
    "What holds": ["SEMANTICS", "PERFORMANCE", "guide/limits", "VERSIONS", "COVERAGE"],
}
SHORT = {  # where a title is longer than a line of the menu
    "MIGRATION": "onnxruntime-training, torch-ort", "COMPATIBILITY": "ORTModule 1.19.2, name by name",
    "guide/from-torch-compile": "torch.compile", "ON_DEVICE": "Training on a device", "ONNX": "The graph as ONNX",
    "GPU_STATUS": "The engine on CUDA", "COVERAGE": "Models", "VERSIONS": "Python, PyTorch, machines",
}  # fmt: skip
STYLE = """.wy-nav-content { max-width: 1200px; }
.rst-content .section table td, .rst-content .section table th { white-space: normal !important; }
.rst-content .section table td { overflow-wrap: break-word; }
.rst-content .section table td:nth-child(4):last-child { overflow-wrap: anywhere; min-width: 16em; }
.rst-content .section table td + td code { white-space: normal; overflow-wrap: anywhere; }
.rst-content img { max-width: 100%; }
"""
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`|\[[^\]\n]*\]\([^)\s]+\))", re.M | re.S)
_NAMED = re.compile(r"(?<![/\w])docs/([\w/-]+\.md)")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def page(text: str, at: Path, src: Path) -> str:
    """The text of the page that will lie at `at`; README is the first page."""

    def link(m: re.Match[str]) -> str:
        name, (path, mark, anchor) = m[1], m[2].partition("#")
        if "://" in path or not path:
            return m[0]
        home = DOCS.parent if at == src / "index.md" else DOCS / at.relative_to(src).parent
        file = (home / path).resolve()
        if file == DOCS.parent / "README.md":
            file = DOCS / "index.md"
        elif DOCS not in file.parents or file.suffix != ".md" and file.parent.name != "pictures":
            return name
        return f"[{name}]({os.path.relpath(src / file.relative_to(DOCS), at.parent)}{mark}{anchor})"

    def named(m: re.Match[str]) -> str:
        file = DOCS / m[1]
        if not file.exists():
            return m[0]
        return f"[{title(file)}]({os.path.relpath(src / m[1], at.parent)})"

    parts = _CODE.split(_LINK.sub(link, text))
    return "".join(part if i % 2 else _NAMED.sub(named, part) for i, part in enumerate(parts))


def title(path: Path) -> str:
    return next(line[2:].strip() for line in path.read_text().splitlines() if line.startswith("# "))


class Page(HTMLParser):
    """What a page refers to, and what may be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.to: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        a = dict(attrs)
        self.ids.update(x for x in (a.get("id"), a.get("name") if tag == "a" else None) if x)
        self.to += [x for x in (a.get("href"), a.get("src")) if x]


def broken(site: Path) -> list[str]:
    pages = {p.resolve(): Page(p.read_text()) for p in site.rglob("*.html") if p.name != "404.html"}
    found: list[str] = []
    for at, page in pages.items():
        for to in page.to:
            path, _, anchor = to.partition("#")
            if re.match(r"\w+:", to) or "${" in to:
                continue
            file = (at.parent / path.partition("?")[0]).resolve() if path else at
            if not file.exists() or anchor and file in pages and anchor not in pages[file].ids:
                found.append(f"{at.relative_to(site)}: {to}")
    return found


def menu(names: list[str]) -> list[str]:
    """Lines of the configuration's nav. names: the pages beside the guides."""

    def row(page: str) -> str:
        return f'"{SHORT.get(page, title(DOCS / (page + ".md")))}": {page}.md'

    taken = {page for pages in SECTIONS.values() for page in pages}
    lines = ["- Overview: index.md", "- Reference: reference.md", "- Guides:"]
    lines += [f"    - {row(f'guide/{g}')}" for g in GUIDES if f"guide/{g}" not in taken]
    for section, pages in {**SECTIONS, "Inside": [n for n in names if n not in taken]}.items():
        lines += [f"- {section}:"] + [f"    - {row(page)}" for page in pages]
    return lines


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    src = out / "src"
    shutil.rmtree(src, ignore_errors=True)
    nav = menu(sorted(p.stem for p in DOCS.glob("*.md")))
    for path in [*DOCS.glob("*.md"), *DOCS.glob("guide/*.md")]:
        to = src / path.relative_to(DOCS)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(page(path.read_text(), to, src))
    shutil.copytree(DOCS / "pictures", src / "pictures")
    (src / "index.md").write_text(page((DOCS.parent / "README.md").read_text(), src / "index.md", src))
    reference = "# Reference\n\n"
    for module, names in REFERENCE.items():
        reference += f"## {module}\n\n" + "".join(f"::: {module}.{n}\n\n" for n in names)
    (src / "reference.md").write_text(reference)
    (src / "style.css").write_text(STYLE)
    config = out / "mkdocs.yml"
    config.write_text(CONFIG.format(src=src, site=out / "site", root=DOCS.parent, nav="\n".join(f"  {n}" for n in nav)))
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", str(config)]
    if code := subprocess.run(mkdocs, check=False).returncode:
        return code
    lost = broken((out / "site").resolve())
    print("\n".join(f"leads nowhere: {x}" for x in lost), file=sys.stderr, end="\n" if lost else "")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
