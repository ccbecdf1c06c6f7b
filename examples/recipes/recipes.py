"""Four trainings of language models, each beside eager PyTorch and torch.compile: tokens a second, memory, the largest
batch that fits.

    python examples/recipes/recipes.py                             # all of them small, a few minutes
    python examples/recipes/recipes.py bert-1 gpt2 --size full --limit 60000 --arms eager,compile,ortmodule

bert-1, bert-2  BERT-large's pre-training: masked words and next sentences, LAMB, accumulation; rows of 128, then of 512
gpt2            GPT-2 medium, fine-tuned; perplexity (`--weights FOLDER`, `--text FILE`: your own)
squad           questions in SQuAD's format, F1 and exact match (`--train FILE --test FILE --weights FOLDER`: your own)

--limit MiB: finds the largest batch whose process stays below. What follows ` -- ` goes to the recipe, after its own
options: `recipes.py squad -- --train train-v1.1.json --test dev-v1.1.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

COMPARE = Path(__file__).resolve().parents[1] / "compare.py"
LARGE = "--size large --words 30522 --text 5000000 --accumulate 8 --bf16"
TINY = "--size tiny --text 100000 --accumulate 2"
RECIPES = {  # name: script, options of the full size, of the small one
    "bert-1": ("bert_pretraining.py", f"--phase 1 {LARGE} --length 128 --batch 32 --steps 12 --lr 6e-3",
               f"--phase 1 {TINY} --length 32 --batch 8 --steps 12"),
    "bert-2": ("bert_pretraining.py", f"--phase 2 {LARGE} --length 512 --batch 8 --steps 12 --lr 4e-3",
               f"--phase 2 {TINY} --length 128 --batch 2 --steps 12"),
    "gpt2": ("gpt2_finetune.py", "--size medium --words 50257 --characters 5000000 --bf16 --length 1024 --batch 4 "
             "--steps 12", "--size tiny --length 64 --batch 8 --steps 12"),
    "squad": ("question_answering.py", "--length 384 --batch 32 --steps 200 --bf16",
              "--length 48 --batch 8 --steps 12"),
}  # fmt: skip


def main() -> int:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="recipe", help=f"some of {', '.join(RECIPES)}; all without")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--arms", default="eager,ortmodule", help="eager, ortmodule, compile")
    parser.add_argument("--rounds", default="1")
    parser.add_argument("--limit", help="MiB")
    args = parser.parse_args(sys.argv[1:cut])
    if unknown := [name for name in args.recipes if name not in RECIPES]:
        parser.error(f"{unknown[0]}: one of {', '.join(RECIPES)}")
    failed = 0
    for name in args.recipes or RECIPES:
        script, full, small = RECIPES[name]
        how = (full if args.size == "full" else small).split() + sys.argv[cut + 1 :]
        more = ["--limit", args.limit] if args.limit else []
        print(f"\n{name}: {script} {' '.join(how)}", flush=True)
        failed |= subprocess.run([sys.executable, COMPARE, script, "--arms", args.arms, "--rounds", args.rounds,
                                  *more, *how]).returncode  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main())
