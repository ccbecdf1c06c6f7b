"""Whole models through ORTModule on the fake GPU (fake_gpu.cpp, fake_blaslt.cpp; CPU tensors stand for cuda:0): BERT,
Llama, ViT, GPT-2. In f32 and under bf16 autocast, with and without dropout, three steps with an optimizer between them:
what `make gpu-check` runs on a GPU (tests/gpu/graph_correct.py).

Held to: losses and gradients of eager PyTorch within twice eager's own error (fp64 eager is the truth), under dropout
those of the CPU engine, whose masks are the same. Nothing may be left to the CPU's rows. With CUDA graphs: the bits of
seven steps without, under dropout."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

SOURCE = """
import torch, graph_correct
from cuda import fake
from ortmodule import _C
fake.late(False)  # PyTorch reads the CPU tensors that stand for the device's without waiting
graph_correct.stand_in()
for dtype in (torch.float32, torch.bfloat16):
    said = graph_correct.one_model(graph_correct.MODELS["{make}"], dtype, "cpu")
    assert said.startswith("ok"), (dtype, said)
    said = graph_correct.graphs_on_and_off("cpu", [(graph_correct.MODELS["{make}"], dtype)])
    assert said.startswith("ok"), (dtype, said)
launches, _, names, products = _C.cuda_engine_counts()
assert not names, names
assert launches > 500 and products > 200 and fake.count(fake.FAILURES) == 0, (launches, products, fake.message())
print("done")
"""


@pytest.mark.parametrize("model,seed", [("bert", 2), ("llama", 5), ("vit", 8), ("gpt2", 3)])
def test_trains(model: str, seed: int) -> None:
    assert child(SOURCE.format(make=model), OM_FAKE_SEED=str(seed)).endswith("done\n")
