"""The documents as a site: python docs/site.py OUT (make docs). MkDocs makes the pages, mkdocstrings the reference.

Links to files that are not pages (tests, sources) become text: the site stands alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
extra_css: [wrap.css]
markdown_extensions: [sane_lists]
nav:
{nav}
"""
WRAP = ".rst-content .section table td, .rst-content .section table th { white-space: normal !important; }\n"
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
        elif file.suffix != ".md" or DOCS not in file.parents:
            return name
        return f"[{name}]({os.path.relpath(src / file.relative_to(DOCS), at.parent)}{mark}{anchor})"

    return _LINK.sub(link, text)


def title(path: Path) -> str:
    return next(line[2:].strip() for line in path.read_text().splitlines() if line.startswith("# "))


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    src = out / "src"
    shutil.rmtree(src, ignore_errors=True)
    others = sorted(p.name for p in DOCS.glob("*.md"))
    nav = ["- Overview: index.md"]
    nav += [f'- "{title(DOCS / "guide" / (g + ".md"))}": guide/{g}.md' for g in GUIDES]
    nav += [f'- "{title(DOCS / name)}": {name}' for name in others] + ["- Reference: reference.md"]
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
    (src / "wrap.css").write_text(WRAP)
    config = out / "mkdocs.yml"
    config.write_text(CONFIG.format(src=src, site=out / "site", root=DOCS.parent, nav="\n".join(f"  {n}" for n in nav)))
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", str(config)]
    return subprocess.run(mkdocs, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
