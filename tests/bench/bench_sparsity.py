"""Steps that leave out padding and rows without a label, beside steps that compute all of them (docs/SPARSITY.md).

    make bench-sparsity                              # BERT-base MLM, GPT-2 with padding, T5-small
    make bench-sparsity BENCH="t5 --layers 2 --steps 3"

For each share of tokens that are no padding: the time of a step of both (forward, loss, backward; minima of the
process's processor time, in pairs), what was gained, that gain as a share of what the arithmetic would give (1 / density,
of tokens alone: labels may give more), and the losses beside each other. The loss alone leaves the module; dropout is
the configuration's. Samples differ in length. Goal: 80 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
from small_models import LossAlone  # noqa: E402

DENSITIES = (0.25, 0.5, 0.75, 1.0)
LABELLED = 0.15  # of BERT's tokens


def lengths(density: float, b: int, t: int) -> Tensor:
    """Of b samples: spread about the mean as far as there is room."""
    room = min(density - 1 / t, 1 - density, 0.2)
    offset = torch.linspace(-1, 1, b) if b > 1 else torch.zeros(1)
    return ((density + room * offset) * t).round().long()


def side(density: float, b: int, t: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(t) < lengths(density, b, t)[:, None]
    return torch.where(mask, torch.randint(5, vocab, (b, t), generator=g), 0), mask


def bert(layers: int | None) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers or 12))


def bert_batch(density: float, b: int, t: int) -> dict[str, Tensor]:
    ids, mask = side(density, b, t, 30522, 1)
    some = torch.rand(b, t, generator=torch.Generator().manual_seed(2)) < LABELLED
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask & some, ids, -100)}


def gpt2(layers: int | None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(n_layer=layers or 12, bos_token_id=0, eos_token_id=0))


def gpt2_batch(density: float, b: int, t: int) -> dict[str, Tensor]:
    ids, mask = side(density, b, t, 50257, 1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def t5(layers: int | None) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration
    return T5ForConditionalGeneration(T5Config(num_layers=layers or 6, decoder_start_token_id=0, pad_token_id=0))


def t5_batch(density: float, b: int, t: int) -> dict[str, Tensor]:
    ids, mask = side(density, b, t, 32128, 1)
    want, kept = side(density, b, t // 2, 32128, 2)
    return {"input_ids": ids, "attention_mask": mask.long(), "decoder_attention_mask": kept.long(), "labels": torch.where(kept, want, -100)}


MODELS: dict[str, tuple[Callable[[int | None], nn.Module], Callable[..., dict[str, Tensor]], int, int]] = {
    "bert": (bert, bert_batch, 8, 128), "gpt2": (gpt2, gpt2_batch, 4, 128), "t5": (t5, t5_batch, 8, 128)}  # fmt: skip


def step(model: nn.Module, batch: dict[str, Tensor], seed: int) -> tuple[float, float]:
    """-> seconds of processor time, loss."""
    model.zero_grad()
    torch.manual_seed(seed)
    began = time.process_time()
    loss = model(**batch)
    loss.backward()
    return time.process_time() - began, loss.item()


def bench(name: str, a: argparse.Namespace) -> None:
    from ortmodule import ORTModule
    make, batch_of, b, t = MODELS[name]
    b, t = a.batch or b, a.time or t
    both: list[Any] = []
    for on in (False, True):
        torch.manual_seed(0)
        both.append(ORTModule(LossAlone(make(a.layers)).train(), padding_sparsity=on, label_sparsity=on, strict="engine"))
    for density in a.density:
        batch = batch_of(density, b, t)
        seen = batch["attention_mask"].float().mean().item()
        for m in both:  # captured, planned
            step(m, batch, 0)
        times: list[list[float]] = [[], []]
        for k in range(a.steps):
            for i in (0, 1) if k % 2 else (1, 0):
                times[i].append(step(both[i], batch, k)[0])
        losses = [step(m, batch, 1)[1] for m in both]
        dense, sparse = map(min, times)
        gain = dense / sparse
        print(f"{name:5s} {b} x {t}  density {seen:.2f}  all rows {dense * 1e3:8.1f} ms  rows that count {sparse * 1e3:8.1f} ms  "
              f"1 / {gain:.2f}  {gain * seen:4.0%} of 1 / density   losses {losses[0]:.6f} {losses[1]:.6f}", flush=True)
    graph = both[1].report().graphs[-1]
    print(f"{name:5s} {graph.padding or 'no products'} without padding, heads on labelled rows: {graph.sparse_heads[0]}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="*", default=[], help=f"of {', '.join(MODELS)}; default: all")
    p.add_argument("--layers", type=int, help="fewer than the model has")
    p.add_argument("--batch", type=int)
    p.add_argument("--time", type=int, help="positions of a sample")
    p.add_argument("--steps", type=int, default=5, help="timed steps of each")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--density", type=float, nargs="*", default=DENSITIES)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for name in a.models or MODELS:
        bench(name, a)


if __name__ == "__main__":
    main()
