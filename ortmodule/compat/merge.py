"""python -m onnxruntime.training.utils.hooks.merge_activation_summary --pt_dir A --ort_dir B --output_dir C

The files that StatisticsSubscriber wrote in two runs as one file per step and run, `merge_pt/step_<n>_.txt` and
`merge_ort/step_<n>_.txt`, both in the order of A/step_0/order.txt, so that a diff shows where they part.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

logger = logging.getLogger("ortmodule")


def _merge(order: list[str], run: Path, into: Path) -> None:
    into.mkdir(parents=True)
    for step in sorted(p for p in run.iterdir() if p.is_dir()):
        parts = []
        for name in order:
            if (step / name).exists():
                parts.append((step / name).read_text(encoding="utf-8") + "\n")
            else:
                logger.warning("%s does not exist", step / name)
        (into / f"{step.name}_.txt").write_text("".join(parts), encoding="utf-8")


def generate_summaries_per_step(args: argparse.Namespace) -> None:
    """args: pt_dir, ort_dir, output_dir."""
    order = list(dict.fromkeys((Path(args.pt_dir) / "step_0/order.txt").read_text(encoding="utf-8").split("\n")))
    order = [name for name in order if name]
    output = Path(args.output_dir)
    _merge(order, Path(args.pt_dir), output / "merge_pt")
    _merge(order, Path(args.ort_dir), output / "merge_ort")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pt_dir", required=True, help="what the run in PyTorch has written")
    parser.add_argument("--ort_dir", required=True, help="what the run with ORTModule has written")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--overwrite", action="store_true", help="remove output_dir when there is one")
    args = parser.parse_args()
    if Path(args.output_dir).exists():
        if not args.overwrite:
            raise FileExistsError(f"Output directory {args.output_dir} already exists; --overwrite removes it")
        shutil.rmtree(args.output_dir)
    generate_summaries_per_step(args)


if __name__ == "__main__":
    main()
