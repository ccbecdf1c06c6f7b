"""The Hugging Face Trainer: the line stands before it. Half precision, accumulation, checkpoints, resuming are its own.

python examples/hf_trainer.py
python examples/hf_trainer.py --steps 40 --resume                # goes on at the last checkpoint in --out
torchrun --nproc-per-node 2 examples/hf_trainer.py               # two processes, by DDP
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import arms
import texts
import torch
import transformers
from torch.utils.data import Dataset


class Bytes(Dataset[dict[str, Any]]):
    """Rows of the library's sources, a token a byte."""

    def __init__(self, length: int) -> None:
        text = "\n".join(line for lines in texts.documents(300_000) for line in lines).encode()
        self.rows = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // length * length].view(-1, length)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    drop = {"resid_pdrop": args.dropout, "embd_pdrop": args.dropout, "attn_pdrop": args.dropout}
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": args.length, "vocab_size": 256}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0))
    if arm == "ortmodule":
        from ortmodule import ORTModule

        net = ORTModule(net)
    how = transformers.TrainingArguments(
        args.out, max_steps=args.steps, per_device_train_batch_size=args.batch, gradient_accumulation_steps=2,
        learning_rate=args.lr, bf16=args.bf16, seed=args.seed, use_cpu=True, torch_compile=arm == "compile",
        logging_steps=1, save_steps=max(args.steps // 2, 1), report_to=[], disable_tqdm=True)  # fmt: skip
    trainer = transformers.Trainer(net, how, train_dataset=Bytes(args.length))
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = {"arm": arm, "losses": losses, "peak_mb": arms.peak_mb()}
    if arm == "ortmodule":
        told["in_engine"] = net.report().node_share
    if trainer.is_world_process_zero():
        print(json.dumps(told), flush=True)
    return told


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=20, batch=8, length=128, lr=1e-3)
    parser.add_argument("--out", default="hf_trainer_out", help="checkpoints")
    parser.add_argument("--resume", action="store_true")
    arms.main(parser, train)
