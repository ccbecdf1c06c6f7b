"""TRL's SFTTrainer and DPOTrainer around an ORTModule on two gloo ranks: losses, gradient norms and weights of the same
training without ORTModule."""

from __future__ import annotations

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

TRL = """
import os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, torch.distributed as dist
import datasets, transformers, trl
from ortmodule import ORTModule
from tokenizers import Tokenizer, models, pre_tokenizers
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
warnings.simplefilter("ignore")
kinds, folder = sys.argv[1].split(","), sys.argv[2]
texts = [f"{a} is {'more' if a > b else 'less'} than {b} , so {a} - {b} is {a - b}" for a in range(2, 9) for b in range(2, 7)]
words = sorted({w for text in texts for w in text.split()})
plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[END]", "[UNK]", *words])}, unk_token="[UNK]"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[END]", unk_token="[UNK]")

def build():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, bos_token_id=None, eos_token_id=1))

class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.found = []
    def on_log(self, args, state, control, logs=None, **rest):
        self.found += [logs[k] for k in ("loss", "grad_norm", "eval_loss", "rewards/margins") if k in logs]

def train(kind, ours):
    model = ORTModule(build()) if ours else build()
    how = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, max_steps=5, learning_rate=1e-2,
               max_length=24, seed=3, use_cpu=True, bf16=kind == "sft bf16", logging_steps=1, gradient_checkpointing=kind == "sft checkpointing",
               save_strategy="no", eval_strategy="steps", eval_steps=3, report_to=[], disable_tqdm=True, output_dir=folder)
    losses = Losses()
    if kind.startswith("dpo"):
        rows = [{"prompt": a[:12], "chosen": a[12:], "rejected": b[12:]} for a, b in zip(texts, texts[1:])]
        data = datasets.Dataset.from_generator(rows.__iter__)
        trainer = trl.DPOTrainer(model, build(), trl.DPOConfig(**how), None, data, data.select(range(4)),
                                 processing_class=tokenizer, callbacks=[losses])
    else:
        rows = [{"text": text} for text in texts]
        data = datasets.Dataset.from_generator(rows.__iter__)
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**how), None, data, data.select(range(4)),
                                 processing_class=tokenizer, callbacks=[losses])
    assert trainer.args.world_size == 2
    trainer.train()
    if ours:
        report = model.report()
        assert report.node_share == 1, report
    return losses.found, torch.cat([p.detach().flatten() for p in model.parameters()])

for kind in kinds:
    theirs, weights = train(kind, False)
    ours, same = train(kind, True)
    tolerance = 1e-2 if kind == "sft bf16" else 1e-4  # Trainer logs four digits
    assert len(ours) == len(theirs) > 10
    assert all(abs(a - b) <= tolerance * max(abs(b), 0.1) for a, b in zip(ours, theirs)), (kind, ours, theirs)
    assert (weights - same).abs().max() <= (5e-2 if kind == "sft bf16" else 1e-4), (kind, (weights - same).abs().max())
    every = [None] * 2
    dist.all_gather_object(every, same.sum().item())
    assert every[0] == every[1]
dist.barrier()
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("kinds", ["sft,sft checkpointing,dpo", "sft bf16"])
def test_losses_are_eagers(kinds: str, tmp_path: object) -> None:
    launch(TRL, kinds, tmp_path, python=python_with("trl", "1.16"))
