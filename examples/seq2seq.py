"""T5 from nothing learns to read dates: "sunday 22 november 2026" -> "2026-11-22".

    python examples/seq2seq.py                                     # about nine of ten dates right in the end
    python examples/seq2seq.py --arm eager,ortmodule --dropout 0   # the same losses

A token is a character. Training runs in the engine; generate(), for the test, in PyTorch: its cache grows.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import arms
import numpy as np
import torch

PAD, END = 0, 1
LETTERS = " -0123456789abcdefghijklmnopqrstuvwxyz"


def dates(n: int, random: np.random.Generator) -> list[tuple[str, str]]:
    first = datetime.date(1900, 1, 1).toordinal()
    days = [datetime.date.fromordinal(first + int(k)) for k in random.integers(80_000, size=n)]
    return [(day.strftime("%A %d %B %Y").lower(), day.isoformat()) for day in days]


def ids(words: list[str]) -> torch.Tensor:
    rows = [[2 + LETTERS.index(c) for c in word] + [END] for word in words]
    return torch.tensor([row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows])


def text(row: list[int]) -> str:
    return "".join(LETTERS[i - 2] for i in row if i > END)


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(T5Config(
        vocab_size=2 + len(LETTERS), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        dropout_rate=args.dropout, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD))  # fmt: skip
    run = arms.Run(net, arm, args)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    random = np.random.default_rng(args.seed)
    for pairs in run.steps(dates(args.batch, random) for _ in iter(int, 1)):
        source, target = ids([a for a, _ in pairs]), ids([b for _, b in pairs])
        with run.precision():
            loss = run.model(input_ids=source, attention_mask=(source != PAD).long(), labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    net.eval()
    asked = dates(100, np.random.default_rng(args.seed + 1))
    source = ids([a for a, _ in asked])
    said = net.generate(input_ids=source, attention_mask=(source != PAD).long(), max_new_tokens=12, do_sample=False)
    right = [text(row) == truth for row, (_, truth) in zip(said.tolist(), asked)]
    return run.told(exact_match=float(np.mean(right)))


if __name__ == "__main__":
    arms.main(arms.options(__doc__, steps=600, batch=64, lr=3e-3), train)
