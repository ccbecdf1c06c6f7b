"""Tensors with an axis of 0: results, gradients and errors are PyTorch's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule

F64 = torch.float64
IMAGES, CHANNELS, ROWS = (0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)
CALLS = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2), "bilinear": lambda x: F.interpolate(x, size=(5, 5), mode="bilinear"), "bicubic": lambda x: F.interpolate(x, size=(5, 5), mode="bicubic"),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 2), "global average": lambda x: F.adaptive_avg_pool2d(x, 1), "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 2), "maximum": lambda x: F.max_pool2d(x, 2), "group norm": lambda x: F.group_norm(x, 3), "instance norm": F.instance_norm,
    "unfold": lambda x: F.unfold(x, 2), "attention": lambda x: F.scaled_dot_product_attention(x, x, x), "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"), "replicate": lambda x: F.pad(x, (1, 1), mode="replicate"),
}  # fmt: skip
TABLES = {
    "mean": lambda x: x.mean(), "rows' mean": lambda x: x.mean(1), "variance": lambda x: x.var(1), "maximum": lambda x: x.max(1).values, "amax": lambda x: x.amax(1), "norm": lambda x: x.norm(dim=1),
    "softmax": lambda x: x.softmax(-1), "logsumexp": lambda x: x.logsumexp(-1), "median": lambda x: x.median(1).values, "sort": lambda x: x.sort(1).values, "product": lambda x: x.prod(1), "cumulated": lambda x: x.cumsum(1),
    "product of matrices": lambda x: x @ x.T, "of columns": lambda x: x.T @ x, "flat": lambda x: x.view(-1), "unknown rest": lambda x: x.reshape(0, -1), "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "distances": lambda x: torch.cdist(x, x), "cosine": lambda x: F.cosine_similarity(x, x * 2), "mse": lambda x: F.mse_loss(x, x * 0), "kl": lambda x: F.kl_div(x, x * 0, reduction="batchmean"),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)), "first": lambda x: x.index_select(0, torch.zeros(1, dtype=torch.long)), "halves": lambda x: x.chunk(2)[0],
}  # fmt: skip
LAYERS = {"group norm": lambda: nn.GroupNorm(3, 3), "batch norm": lambda: nn.BatchNorm2d(3), "convolution": lambda: nn.Conv2d(3, 4, 2, padding=1), "transposed": lambda: nn.ConvTranspose2d(3, 4, 2)}


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.w, self.call = nn.Parameter(torch.ones((), dtype=F64)), call

    def forward(self, x):
        return self.call(x * self.w)


def outcome(model, shape):
    """What two steps give, an error by its class."""
    steps = []
    for _ in range(2):
        x = torch.ones(shape, dtype=F64, requires_grad=True)
        try:
            y = model(x)
            y.sum().backward()
            steps.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
        except (RuntimeError, IndexError, ValueError) as e:
            steps.append(type(e))
        model.zero_grad()
    return steps


def check(model, shape):
    for mine, theirs in zip(outcome(ORTModule(copy.deepcopy(model)), shape), outcome(model, shape), strict=True):
        if isinstance(theirs, type) or isinstance(mine, type):
            assert mine is theirs
        else:
            torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("shape", (IMAGES, CHANNELS, ROWS), ids=("images", "channels", "rows"))
@pytest.mark.parametrize("name", CALLS)
def test_images(name, shape):
    check(Net(CALLS[name]), shape)


@pytest.mark.parametrize("shape", ((0, 4), (4, 0), (0, 0)), ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_tables(name, shape):
    check(Net(TABLES[name]), shape)


@pytest.mark.parametrize("shape", (IMAGES, ROWS), ids=("images", "rows"))
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, shape):
    torch.manual_seed(0)
    check(Net(LAYERS[name]().to(F64)), shape)
