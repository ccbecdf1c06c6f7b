"""Writes the seeds of fuzz_onnx.c: the models of tests/onnx_models.py, small hostile files, a few graphs as text.

    python tests/fuzz/seeds.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hostile  # noqa: E402
import onnx_models  # noqa: E402

TEXT = """graph {
  sym s0 = x[1]
  input x: f32[2, s0]
  param w "odd name": f32[7, 2]
  const c0: i64[2] = [1, -2]
  const c1: bf16[1] = hex "803f"
  y = matmul(w, x, _)
  z, m, r = layer_norm(y, _, _) {axis=1, eps=1e-05} @"h.0" "model.py":12 rng=3 seg=1
  output z
  write w -> w
  grad w = none
}
"""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, key in enumerate(onnx_models.CASES):
        for dynamic in (False, True):
            model, _ = onnx_models.model_of(key, dynamic)
            (folder / f"{i}_{int(dynamic)}.onnx").write_bytes(model.SerializeToString())
        graph = onnx_models.Graph.onnx(onnx_models.model_of(key, key != "Conv:same")[0].SerializeToString())
        n_in, n_out = (sum(ln.lstrip().startswith(word + " ") for ln in graph.text().splitlines()) for word in ("input", "output"))
        (folder / f"{i}.txt").write_text(graph.grad([1] * n_in, [1] + [0] * (n_out - 1)).text())
    (folder / "shapes.onnx").write_bytes(onnx_models.shape_model()[0].SerializeToString())
    for i, (data, _) in enumerate(hostile.SMALL.values()):
        (folder / f"hostile{i}.onnx").write_bytes(data)
    (folder / "graph.txt").write_text(TEXT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
