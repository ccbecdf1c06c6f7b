"""The smallest models of docs/COVERAGE.md (`make coverage`), one of each kind, beside eager PyTorch: outputs and all
gradients at four sizes, wholly in the engine or with the regions that stand here, and how often they are captured."""

from __future__ import annotations

import pytest
from measure import measure
from rows import Table, table

# name -> captures after the four steps, status
SHORT: dict[str, tuple[str, str]] = {
    "hypernetwork": ("1/1/2/2", "engine"),
    "LoRA over frozen weights": ("1/1/2/2", "engine"),
    "loss: poisson_nll": ("1/1/2/2", "engine"),
    "SIREN": ("1/1/2/2", "engine"),
    "loss: cross entropy with class weights": ("1/1/2/2", "engine"),
    "loss: CTC": ("1/1/2/2", "engine"),
    "loss: cosine embedding": ("1/1/2/2", "engine"),
    "loss: triplet": ("1/1/2/2", "engine"),
    "loss: over selected rows": ("1/1/2/2", "regions"),
    "mixture of experts, dense gate": ("1/1/2/2", "engine"),
    "mixture of experts, top 2, a loop over experts": ("1/1/2/2", "regions"),
    "DCGAN generator": ("1/1/2/2", "engine"),
    "flow: masked autoregressive": ("1/1/2/2", "engine"),
    "DQN, dueling, Huber": ("1/1/2/2", "engine"),
    "memory network, checkpointed": ("1/1/2/2", "engine"),
    "deep equilibrium, solved under no_grad": ("1/1/2/2", "engine"),
    "3-D CNN": ("1/1/2/2", "engine"),
    "spectral norm": ("1/1/2/2", "engine"),
    "distribution: Categorical": ("1/1/2/2", "engine"),
    "VQ-VAE": ("1/1/2/2", "engine"),
    "EfficientNet block": ("1/1/2/2", "engine"),
    "GCN, index_add": ("1/1/2/2", "engine"),
    "DGCNN, nearest neighbours": ("1/1/2/2", "engine"),
    "PointNet": ("1/1/2/2", "engine"),
    "NeRF, volume rendering": ("1/1/2/2", "engine"),
    "PPO, discrete and continuous": ("1/1/2/2", "engine"),
    "ViTForImageClassification": ("1/1/2/2", "engine"),
    "BertForMaskedLM": ("1/1/2/2", "engine"),
    "GPT2LMHeadModel": ("1/1/2/2", "engine"),
    "MixtralForCausalLM": ("1/1/2/2", "engine"),
}


@pytest.fixture(scope="module")
def made() -> Table:
    return table()


@pytest.mark.parametrize("name", SHORT)
def test_as_the_table_says(name: str, made: Table) -> None:
    captures, status = SHORT[name]
    row = next((r for r in made.rows if r.name == name), None)
    if row is None and made.missing:
        pytest.skip("; ".join(made.missing))
    assert row is not None
    got = measure(row)
    assert (got.status, "/".join(map(str, got.captures))) == (status, captures), got
