"""Operators at sizes that vary, down to a batch of 1: whatever is decided by a size is decided again (outputs, gradients)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ortmodule import ORTModule

RULES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chunk3": lambda m, x: sum(c.sum(0) * (i + 1) for i, c in enumerate(x.chunk(3))),
    "split2": lambda m, x: sum(c.sum(0) * (i + 1) for i, c in enumerate(x.split(2))),
    "tensor_split": lambda m, x: sum(c.sum(0) * (i + 1) for i, c in enumerate(x.tensor_split(2))),
    "unbind": lambda m, x: sum(c * (i + 1) for i, c in enumerate(x.unbind(0))),
    "iter": lambda m, x: sum(c * (i + 1) for i, c in enumerate(x)),
    "einsum": lambda m, x: torch.einsum("bij,bkj->ik", x, x),
    "einsum2": lambda m, x: torch.einsum("bij,cj->bci", x, m.w),
    "tensordot": lambda m, x: torch.tensordot(x, x, dims=([0], [0])),
    "bmm": lambda m, x: torch.matmul(x, x.transpose(-1, -2)),
    "mm_b": lambda m, x: torch.matmul(m.w, x.transpose(-1, -2)),
    "matvec": lambda m, x: x[:, 0] @ x[0, 0],
    "var": lambda m, x: x.var(0, correction=0),
    "std1": lambda m, x: x.std(0),
    "norm": lambda m, x: F.normalize(x, dim=0),
    "cat_b": lambda m, x: torch.cat([x, x[:1]], 0),
    "stack": lambda m, x: torch.stack([x, x], 1),
    "bcast": lambda m, x: x + x[:1],
    "bcast_mean": lambda m, x: x - x.mean(0, keepdim=True),
    "outer": lambda m, x: x[:, None, 0] * x[None, :, 0],
    "expand": lambda m, x: x[:1].expand_as(x) * 2,
    "expand-1": lambda m, x: x[:, :1].expand(-1, 4, -1),
    "repeat": lambda m, x: x.repeat(2, 1, 1),
    "ri": lambda m, x: x.repeat_interleave(2, 0),
    "roll": lambda m, x: x.roll(1, 0),
    "flip": lambda m, x: x.flip(0),
    "tril": lambda m, x: x[:, 0, :].tril(),
    "diag": lambda m, x: torch.diagonal(x, dim1=0, dim2=1),
    "diagemb": lambda m, x: torch.diag_embed(x[:, 0, 0]),
    "cumsum": lambda m, x: x.cumsum(0),
    "sort": lambda m, x: x.sort(0)[0],
    "topk": lambda m, x: x.flatten().topk(2)[0],
    "max0": lambda m, x: x.max(0)[0],
    "median": lambda m, x: x.median(0)[0],
    "pdist": lambda m, x: torch.cdist(x[:, 0], x[:, 0] + 1),
    "softmax0": lambda m, x: x.softmax(0),
    "lse": lambda m, x: x.logsumexp((0, 1)),
    "ce": lambda m, x: F.cross_entropy(x[:, 0], torch.arange(x.shape[0]) % 6),
    "bn": lambda m, x: m.bn(x.transpose(1, 2)),
    "bneval": lambda m, x: F.batch_norm(x.transpose(1, 2), m.bn.running_mean, m.bn.running_var),
    "gn": lambda m, x: F.group_norm(x.transpose(1, 2), 2),
    "in": lambda m, x: F.instance_norm(x),
    "pool": lambda m, x: F.adaptive_avg_pool1d(x, 2),
    "poolb": lambda m, x: F.avg_pool1d(x.permute(1, 2, 0), 1),
    "padc": lambda m, x: F.pad(x, (1, 1), mode="circular"),
    "padr": lambda m, x: F.pad(x.permute(1, 2, 0)[..., None].expand(-1, -1, -1, 2), (0, 0, 1, 0), mode="replicate"),
    "interp": lambda m, x: F.interpolate(x.permute(1, 2, 0), scale_factor=2),
    "interpl": lambda m, x: F.interpolate(x.permute(1, 2, 0), scale_factor=2.0, mode="linear"),
    "unfold": lambda m, x: x.unfold(2, 3, 1),
    "mha": lambda m, x: m.mha(x, x, x)[0],
    "mha_u": lambda m, x: m.mha(x[:, 0], x[:, 0], x[:, 0])[0],
    "lstm": lambda m, x: m.lstm(x)[0],
    "lstm_u": lambda m, x: m.lstm(x[:, 0])[0],
    "conv1": lambda m, x: m.conv(x),
    "convb": lambda m, x: F.conv1d(x.permute(1, 2, 0).contiguous(), m.w[:, :, None]),
    "linmean": lambda m, x: m.l(x).mean(),
    "mse": lambda m, x: F.mse_loss(m.l(x), x),
    "sdpa": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "sdpa_u": lambda m, x: F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0]),
    "where": lambda m, x: torch.where(x > 0, x, x[:1]),
    "gather": lambda m, x: x.gather(0, torch.zeros(1, 4, 6, dtype=torch.long).expand(x.shape[0], -1, -1)),
    "idx": lambda m, x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "idxb": lambda m, x: x[torch.arange(x.shape[0]), torch.zeros(1, dtype=torch.long)],
    "atl": lambda m, x: torch.atleast_3d(x[:, 0]).sum(1),
    "movedim": lambda m, x: x.movedim(0, -1).reshape(4, -1),
    "mT": lambda m, x: x.mT.reshape(x.shape[0], -1),
    "view-1": lambda m, x: x.view(-1, 12),
    "squeeze1": lambda m, x: x[:, :1].squeeze(1),
    "sqall": lambda m, x: x[:, :1, :1].squeeze(),
    "sqlike": lambda m, x: x.mean((1, 2)).squeeze(),
    "item0": lambda m, x: x.mean((1, 2))[-1],
    "prod": lambda m, x: x.prod(0),
    "kron": lambda m, x: torch.kron(x[:, 0], m.w[:2, :2]),
    "block": lambda m, x: torch.block_diag(x[:, 0], m.w),
    "hstack": lambda m, x: torch.hstack([x[:, 0, 0], x[:, 0, 1]]),
    "vstack": lambda m, x: torch.vstack([x[:, 0], x[:, 1]]),
    "tile": lambda m, x: torch.tile(x, (2, 1)),
    "cos": lambda m, x: F.cosine_similarity(x, x[:1], dim=0),
    "triu": lambda m, x: torch.triu(torch.ones(x.shape[0], x.shape[0], dtype=x.dtype), 1) @ x[:, 0],
    "lin_1": lambda m, x: F.linear(x[:, 0], x[:1, 1]),
    "bilinear": lambda m, x: F.bilinear(x, x, m.w.view(1, 6, 6)),
    "emb": lambda m, x: F.embedding(torch.arange(x.shape[0]) % 6, m.w),
    "matexp": lambda m, x: x.sum(0, keepdim=True).squeeze(0),
    "addmm": lambda m, x: torch.addmm(x[:1, 0], x[:, 0], m.w),
    "baddbmm": lambda m, x: torch.baddbmm(x[:1], x, x.new_ones(x.shape[0], 6, 6)),
    "mv": lambda m, x: torch.mv(x[:, 0], x[0, 0]),
    "dot": lambda m, x: torch.dot(x[:, 0, 0], x[:, 0, 1]),
}


class Net(nn.Module):
    def __init__(self, rule: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.l, self.w, self.bn = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.BatchNorm1d(6)
        self.mha, self.lstm = nn.MultiheadAttention(6, 2, batch_first=True), nn.LSTM(6, 5, batch_first=True)
        self.conv, self.rule = nn.Conv1d(4, 3, 2), rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


@pytest.mark.parametrize("name", RULES)
def test_at_every_size(name: str) -> None:
    torch.manual_seed(0)
    eager = Net(RULES[name]).double()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (3, 2, 1, 4, 1):
        data, found = torch.randn(rows, 4, 6, dtype=torch.float64), []
        for model in (ours, eager):
            model.zero_grad()
            x = data.clone().requires_grad_()
            y = model(x)
            (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None), rows
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)
