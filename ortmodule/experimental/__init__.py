"""Names of onnxruntime-training's experimental package that scripts use."""
