"""A training that goes on where it was killed, to the bit, on one process or several (docs/guide/checkpoints.md):

    torchrun --nproc-per-node 2 examples/resume.py FOLDER --steps 60 --every 10

Writes the loss of every step, with all its bits, to FOLDER/losses-RANK.txt.
"""

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from ortmodule import ORTModule, checkpoint
from ortmodule.optim import FusedAdam

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10)
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
model: nn.Module = ORTModule(nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 256)))
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = FusedAdam(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()[:8192]), dtype=torch.uint8).view(-1, 32).long()
sampler: DistributedSampler[int] = DistributedSampler(text, world, rank)  # type: ignore[arg-type]
loader = DataLoader(text, 8, sampler=sampler)  # type: ignore[arg-type]

torch.manual_seed(1 + rank)  # dropout is not the same on all ranks
step = checkpoint.load(args.folder, model, optimizer, schedule=schedule)
args.folder.mkdir(parents=True, exist_ok=True)
log = open(args.folder / f"losses-{rank}.txt", "a")
while step < args.steps:
    sampler.set_epoch(step // len(loader))
    with torch.random.fork_rng():  # an iterator draws from the generator, also one that begins in the middle
        batches = itertools.islice(loader, step % len(loader), step % len(loader) + args.steps - step)
    for ids in batches:
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        print(step, loss.item().hex(), file=log, flush=True)
        if step % args.every == 0:
            checkpoint.save(args.folder, step, model, optimizer, schedule=schedule)
if world > 1:
    dist.destroy_process_group()
