"""BERT's pre-training from nothing: masked words and next sentences, LAMB, two phases of lengths, real text.

    python examples/bert_pretraining.py                                  # a small one, a few minutes
    python examples/bert_pretraining.py --size base --batch 8 --steps 100 --bf16
    python examples/compare.py bert_pretraining.py --size base --batch 4 --steps 12   # beside eager and torch.compile

    python examples/bert_pretraining.py --phase 1 --save phase1.pt --size large --length 128 --accumulate 16
    python examples/bert_pretraining.py --phase 2 --begin phase1.pt --size large --length 512 --accumulate 16

The text is the source of Python's library, the vocabulary is learnt from it. The last tenth of the steps has rows four
times as long and a fourth of the rows (phase 2); with --phase 1 or 2 all rows are --length long, 4 x as long is what
phase 1 leaves positions for. --accumulate: batches before LAMB makes one update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import arms
import numpy as np
import texts
import torch
from torch.optim.lr_scheduler import LambdaLR

from ortmodule.optim import FusedLAMB

SIZES = {
    "tiny": (2, 64, 2),
    "small": (4, 256, 4),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}  # layers, width, heads


def rows_of(
    documents: list[list[int]], length: int, random: np.random.Generator
) -> Iterator[tuple[list[int], int, int]]:
    """[CLS] a [SEP] b [SEP], where b begins, and 1 where b is not what follows a."""
    while True:
        ids = documents[random.integers(len(documents))]
        half = (length - 3) // 2
        if len(ids) < 2 * half:
            continue
        at = int(random.integers(len(ids) - 2 * half + 1))
        first, second, other = ids[at : at + half], ids[at + half : at + 2 * half], int(random.integers(2))
        if other:
            stranger = documents[random.integers(len(documents))]
            at = int(random.integers(max(len(stranger) - half, 1)))
            second = stranger[at : at + half]
        yield [texts.CLS, *first, texts.SEP, *second, texts.SEP], half + 2, other


def batches(documents: list[list[int]], words: int, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """15 % of the tokens are to be found: of these 80 % are masked, 10 % are others, 10 % as they are."""
    random = np.random.default_rng(args.seed)
    phases = [(args.batch, args.length, args.steps)]
    if not args.phase:
        last = args.steps // 10
        phases = [(args.batch, args.length, args.steps - last), (max(args.batch // 4, 1), 4 * args.length, last)]
    for rows, length, steps in phases:
        source = rows_of(documents, length, random)
        for _ in range(steps * args.accumulate):
            ids, kinds, other = (
                np.full((rows, length), texts.PAD),
                np.zeros((rows, length), np.int64),
                np.zeros(rows, np.int64),
            )
            for i, (row, second, no) in zip(range(rows), source):
                ids[i, : len(row)], kinds[i, second : len(row)], other[i] = row, 1, no
            found = (random.random(ids.shape) < 0.15) & (ids > texts.MASK)
            how = random.random(ids.shape)
            shown = np.where(found & (how < 0.8), texts.MASK, ids)
            shown = np.where(found & (how >= 0.9), random.integers(5, words, ids.shape), shown)
            given = {"input_ids": shown, "attention_mask": (ids != texts.PAD).astype(np.int64), "token_type_ids": kinds,
                     "labels": np.where(found, ids, -100), "next_sentence_label": other}  # fmt: skip
            yield {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in given.items()}


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import BertConfig, BertForPreTraining

    text = texts.documents(args.text)
    tokenizer = texts.learnt_tokenizer([line for lines in text for line in lines], args.words)
    documents = [[i for one in tokenizer.encode_batch(lines) for i in one.ids] for lines in text]
    layers, width, heads = SIZES[args.size]
    net = BertForPreTraining(BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=args.length * (1 if args.phase == 2 else 4),
        hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout))  # fmt: skip
    if args.begin:
        net.load_state_dict(torch.load(args.begin, weights_only=True))
    run = arms.Run(net, arm, args, tokens=args.batch * args.length * args.accumulate)
    decayed = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() < 2]
    optimizer = FusedLAMB(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=args.lr
    )
    warm = max(args.steps // 10, 1)
    rate = LambdaLR(optimizer, lambda s: min((s + 1) / warm, max(args.steps - s, 0) / max(args.steps - warm, 1)))
    made = batches(documents, tokenizer.get_vocab_size(), args)
    for _ in run.steps(iter(int, 1)):
        total = 0.0
        for _ in range(args.accumulate):
            with run.precision():
                loss = run.model(**next(made)).loss / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        run.losses.append(total)
    if args.save:
        torch.save(net.state_dict(), args.save)
    return run.told()


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=300, batch=32, length=64, lr=4e-3)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--words", type=int, default=4096, help="the vocabulary")
    parser.add_argument("--text", type=int, default=1_000_000, help="characters")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--phase", type=int, choices=(0, 1, 2), default=0, help="0: both in one run")
    parser.add_argument("--begin", help="weights to begin with")
    parser.add_argument("--save", help="a file for the weights")
    arms.main(parser, train)
