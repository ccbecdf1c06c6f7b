"""Federated averaging with numpy alone: four client processes, each with its own digits, never share an image.

    python examples/digits.py out && python examples/federated_digits.py out

The server sends all parameters as one buffer; a client trains on its data and sends them back; the server averages,
weighted by rows. Two thirds of a client's rows are of its own three digits. Prints the accuracy after every round, and
of central training on all rows for as many steps. Exit status 1 when the federated one stays more than two points
below.
"""

import argparse
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ortmodule.api import CheckpointState, LinearLRScheduler, Module, Optimizer, set_seed

CLIENTS, ROUNDS, EPOCHS, TRAIN = 4, 25, 3, 1500


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = Path(__file__).with_name("digits.u8").read_bytes()
    head, _, rest = data.partition(b"\n")
    n = int(head.split()[1])
    pixels = np.frombuffer(rest, np.uint8)
    return pixels[: 64 * n].reshape(n, 64).astype(np.float32) / 16 - 0.5, pixels[64 * n :].astype(np.int64)


def load(home: Path, checkpoint: str) -> tuple[Module, Optimizer]:
    state = CheckpointState.load_checkpoint(home / checkpoint)
    module = Module(home / "training_model.onnx", state, home / "eval_model.onnx")
    return module, Optimizer(home / "optimizer_model.onnx", module)


def train(module: Module, optimizer: Optimizer, x: np.ndarray, labels: np.ndarray, epochs: int, seed: int) -> None:
    batch = 25
    module.train()
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(x))
        for at in range(0, len(x) - batch + 1, batch):
            rows = order[at : at + batch]
            module(x[rows], labels[rows])
            optimizer.step()
            module.lazy_reset_grad()


def accuracy(module: Module, x: np.ndarray, labels: np.ndarray) -> float:
    module.eval()
    right = [module(x[i : i + 25], labels[i : i + 25])[1].argmax(1) == labels[i : i + 25] for i in range(0, 275, 25)]
    return float(np.concatenate(right).mean())


def client(home: Path, number: int, rows: np.ndarray, pipe: Connection) -> None:
    """Begins without any weights: its checkpoint is nominal."""
    x, labels = digits()
    set_seed(number)
    module, optimizer = load(home, "nominal_checkpoint")
    for turn in range(ROUNDS):
        module.copy_buffer_to_parameters(pipe.recv(), trainable_only=False)
        train(module, optimizer, x[rows], labels[rows], EPOCHS, 100 * number + turn)
        pipe.send(module.get_contiguous_parameters())


def shares(labels: np.ndarray) -> list[np.ndarray]:
    """Rows of each client: two thirds of digits c, c + 4, c + 8 (modulo 10), the others from anywhere."""
    random = np.random.default_rng(0)
    left = set(range(TRAIN))
    result = []
    for c in range(CLIENTS):
        mine = [i for i in sorted(left) if labels[i] in {c, (c + 4) % 10, (c + 8) % 10}]
        mine = list(random.permutation(mine)[: TRAIN // CLIENTS * 2 // 3])
        left -= set(mine)
        result.append(mine)
    rest = random.permutation(sorted(left))
    return [np.array([*mine, *part]) for mine, part in zip(result, np.array_split(rest, CLIENTS))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what digits.py has made")
    home = parser.parse_args().directory
    x, labels = digits()
    server, _ = load(home, "checkpoint")
    parts = shares(labels[:TRAIN])
    context = get_context("spawn")
    pipes, processes = [], []
    for number, rows in enumerate(parts):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=client, args=(home, number, rows, theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    weights = np.array([len(rows) for rows in parts]) / TRAIN
    for turn in range(ROUNDS):
        buffer = server.get_contiguous_parameters()
        for pipe in pipes:
            pipe.send(buffer)
        average = sum(w * pipe.recv().astype(np.float64) for w, pipe in zip(weights, pipes))
        server.copy_buffer_to_parameters(average, trainable_only=False)
        federated = accuracy(server, x[TRAIN:], labels[TRAIN:])
        print(f"round {turn} accuracy {federated:.4f}", flush=True)
    for process in processes:
        process.join()
    module, optimizer = load(home, "checkpoint")
    total = ROUNDS * EPOCHS * (TRAIN // 25)
    schedule = LinearLRScheduler(optimizer, 10, 2 * total, 2e-3)
    for epoch in range(ROUNDS * EPOCHS):
        train(module, optimizer, x[:TRAIN], labels[:TRAIN], 1, epoch)
        schedule.step()
    central = accuracy(module, x[TRAIN:], labels[TRAIN:])
    print(f"central accuracy {central:.4f}")
    return int(federated < central - 0.02)


if __name__ == "__main__":
    sys.exit(main())
