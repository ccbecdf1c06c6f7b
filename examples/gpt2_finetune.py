"""GPT-2 fine-tuned on a text of one's own; its measure is the perplexity of lines that it has not seen.

    python examples/gpt2_finetune.py                                       # a small one, from random weights
    python examples/gpt2_finetune.py --size medium --length 1024 --batch 4 --bf16
    python examples/gpt2_finetune.py --weights FOLDER --text my.txt        # from weights of Hugging Face

Without --text it learns the source of Python's library, without --weights a vocabulary of it, too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import arms
import texts
import torch

SIZES = {"tiny": (2, 64, 2), "small": (12, 768, 12), "medium": (24, 1024, 16)}  # layers, width, heads


def begun(lines: list[str], args: argparse.Namespace) -> tuple[Any, list[int]]:
    """The net and the ids of all lines."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": args.dropout, "embd_pdrop": args.dropout, "attn_pdrop": args.dropout}
    if args.weights:
        known = AutoTokenizer.from_pretrained(args.weights, local_files_only=True)
        net = GPT2LMHeadModel.from_pretrained(args.weights, local_files_only=True, **drops)
        return net, [i for line in lines for i in known.encode(line + "\n")]
    learnt = texts.learnt_tokenizer(lines, args.words)
    layers, width, heads = SIZES[args.size]
    net = GPT2LMHeadModel(GPT2Config(
        vocab_size=learnt.get_vocab_size(), n_positions=args.length, n_embd=width, n_layer=layers, n_head=heads,
        bos_token_id=texts.CLS, eos_token_id=texts.SEP, **drops))  # fmt: skip
    return net, [i for one in learnt.encode_batch(lines) for i in (*one.ids, texts.SEP)]


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    if args.text:
        lines = Path(args.text).read_text().splitlines()
    else:
        lines = [line for some in texts.documents(args.characters) for line in some]
    net, ids = begun(lines, args)
    rows = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    test, known = rows[: max(len(rows) // 10, 1)][: 4 * args.batch], rows[max(len(rows) // 10, 1) :]
    run = arms.Run(net, arm, args, tokens=args.batch * args.length)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.01)
    order = torch.randint(len(known), (args.steps, args.batch), generator=torch.Generator().manual_seed(args.seed))
    for chosen in run.steps(order):
        with run.precision():
            loss = run.model(input_ids=known[chosen], labels=known[chosen], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.model.eval()
    with torch.no_grad(), run.precision():
        parts = test.split(args.batch)
        losses = [run.model(input_ids=part, labels=part, use_cache=False).loss.item() for part in parts]
    return run.told(perplexity=math.exp(sum(losses) / len(losses)))


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=100, batch=8, length=64, lr=5e-4)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--words", type=int, default=2048, help="the vocabulary, without --weights")
    parser.add_argument("--characters", type=int, default=500_000, help="of Python's library")
    parser.add_argument("--text", help="a file with the text")
    parser.add_argument("--weights", help="a folder with a GPT-2 of Hugging Face and its tokenizer")
    arms.main(parser, train)
