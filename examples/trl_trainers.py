"""TRL: supervised fine-tuning, or preferences (`--dpo`). The line stands before the trainer. Needs `pip install trl`.

python examples/trl_trainers.py --dpo --arm eager,ortmodule --dropout 0    # the same losses
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import arms
import datasets
import texts
import transformers
import trl


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    lines = [line for lines in texts.documents(60_000) for line in lines if 20 < len(line) < 80]
    learnt = texts.learnt_tokenizer(lines, 400)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=learnt, pad_token="[PAD]", eos_token="[SEP]")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    config = transformers.LlamaConfig(vocab_size=len(words), attention_dropout=args.dropout, **sizes, **ids)
    net = transformers.LlamaForCausalLM(config)
    if arm == "ortmodule":
        from ortmodule import ORTModule

        net = ORTModule(net)
    how = {"output_dir": args.out, "max_steps": args.steps, "per_device_train_batch_size": args.batch,
           "seed": args.seed, "learning_rate": args.lr, "max_length": args.length, "bf16": args.bf16, "use_cpu": True,
           "logging_steps": 1, "gradient_checkpointing": False, "save_strategy": "no", "report_to": []}  # fmt: skip

    rows = [{"prompt": a[:8], "chosen": a[8:], "rejected": b[8:]} for a, b in zip(lines, lines[1:])]
    rows = rows if args.dpo else [{"text": line} for line in lines]
    data = datasets.Dataset.from_generator(rows.__iter__)  # datasets 5.2 fails to name what is made from a list
    if args.dpo:
        reference = transformers.LlamaForCausalLM(config)
        reference.load_state_dict(net.state_dict())
        trainer = trl.DPOTrainer(net, reference, trl.DPOConfig(**how), None, data, processing_class=words)
    else:
        trainer = trl.SFTTrainer(net, trl.SFTConfig(**how), None, data, processing_class=words)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = {"arm": arm, "losses": losses, "peak_mb": arms.peak_mb()}
    if arm == "ortmodule":
        told["in_engine"] = net.report().node_share
    print(json.dumps(told), flush=True)
    return told


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=20, batch=8, lr=1e-3)
    parser.add_argument("--dpo", action="store_true", help="preferences")
    parser.add_argument("--out", default="trl-out", help="a folder")
    arms.main(parser, train)
