"""Padding sparsity's memory, planned: rows that are taken out are taken out again in backward from what is kept anyway
(csrc/passes/remat_choose.c), so that a step is planned no larger than one over all rows."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from small_models import LossAlone
from torch import nn

from ortmodule import ORTModule


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(
        num_hidden_layers=3, hidden_size=48, num_attention_heads=4, intermediate_size=192, vocab_size=301))  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=301, n_positions=96, bos_token_id=0,
                                                                eos_token_id=0))  # fmt: skip


@pytest.mark.parametrize("make", [bert, gpt2])
def test_planned_memory(make) -> None:
    torch.manual_seed(0)
    model = LossAlone(make()).train()
    ids = torch.randint(1, 301, (8, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(64) < torch.tensor([64, 10, 20, 30, 40, 50, 5, 25])[:, None]
    given = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}
    sparse, dense = (ORTModule(copy.deepcopy(model), strict="engine", padding_sparsity=on) for on in (True, False))
    found = []
    for m in (sparse, dense):
        torch.manual_seed(2)
        loss = m(**given)
        loss.backward()
        memory = m.report().graphs[0].memory
        assert memory is not None
        found.append((memory.peak, loss.detach(), [p.grad for p in m.parameters()]))
    assert sparse.report().graphs[0].padding.endswith(" products")
    assert found[0][0] <= 1.02 * found[1][0], [x[0] for x in found]
    torch.testing.assert_close(found[0][1], found[1][1])
    for a, b in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
