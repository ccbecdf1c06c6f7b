"""Makes examples/digits.u8 of scikit-learn's digits set (needs scikit-learn): 1797 images of 8 x 8 pixels, 0 to 16.

The file: "digits 1797\n", then the images (64 bytes each), then the labels (a byte each). The order is shuffled
once, so that the first rows can be the training set.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

data = load_digits()
order = np.random.default_rng(0).permutation(len(data.target))
images, labels = data.images[order].astype(np.uint8), data.target[order].astype(np.uint8)
head = f"digits {len(labels)}\n".encode()
Path(__file__).with_name("digits.u8").write_bytes(head + images.tobytes() + labels.tobytes())
