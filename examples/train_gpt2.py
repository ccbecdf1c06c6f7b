"""Trains a small GPT-2 on the Python standard library's own sources, byte by byte, twice in one run: eager PyTorch and
ORTModule.

    python examples/train_gpt2.py                   # about three minutes on two cores
    python examples/train_gpt2.py --steps 20 --out /tmp/demo

Both arms start from the same weights and see the same batches; their steps alternate, so a busy machine disturbs both
alike. Writes loss.png (both curves), prints progress, times of capture, plan and first step, the coverage report and a
sampled text. Memory is measured in two child processes of a few steps each: peak resident set above the process before
its first step, minus gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch


def corpus(limit: int) -> torch.Tensor:
    """Bytes of the standard library's modules, as one int64 vector."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    return torch.frombuffer(data[:limit], dtype=torch.uint8).long()


def batches(data: torch.Tensor, batch: int, seq: int, steps: int, seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - seq, (steps, batch), generator=gen)
    return [torch.stack([data[s:s + seq] for s in row.tolist()]) for row in starts]


def make_model(a: argparse.Namespace) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(a.seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=a.seq, n_embd=a.dim, n_layer=a.layers, n_head=a.heads,
                                      bos_token_id=0, eos_token_id=0))


class Arm:
    """One of the two trainings: model, optimizer, what was measured."""

    def __init__(self, name: str, a: argparse.Namespace):
        self.name, self.model = name, make_model(a).train()
        if name == "ORTModule":
            from ortmodule import ORTModule

            self.model = ORTModule(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=a.lr)
        self.loss: list[float] = []
        self.ms: list[float] = []

    def step(self, ids: torch.Tensor) -> None:
        t = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.loss.append(loss.item())
        self.ms.append((time.perf_counter() - t) * 1e3)


def rss_mib(reset: bool = False) -> float:
    """Peak resident set since the last reset (getrusage's would include the parent's before exec)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


def measure_memory(name: str, a: argparse.Namespace) -> None:
    """Child process: peak memory of three steps."""
    arm = Arm(name, a)
    ids = batches(corpus(1 << 18), a.batch, a.seq, 3, a.seed)
    before = rss_mib(reset=True)
    for x in ids:
        arm.step(x)
    fixed = sum(p.numel() for p in arm.model.parameters()) * 12 / 2**20
    print(json.dumps({"step_mib": rss_mib() - before - fixed}))


def picture(arms: list[Arm], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for arm, style in zip(arms, ("-", "--")):
        left.plot(arm.loss, style, label=arm.name, linewidth=1.6)
        right.plot([m / 1e3 for m in arm.ms[1:]], style, label=f"{arm.name}", linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss: same weights, same batches")
    right.set(xlabel="step", ylabel="seconds", title="Time per step (after the first)", ylim=(0, None))
    left.legend(), right.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def sample(model: torch.nn.Module, prompt: str, n: int) -> str:
    model.eval()
    ids = torch.tensor([list(prompt.encode())])
    torch.manual_seed(1)
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=n, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0)
    return bytes(out[0].tolist()).decode(errors="replace")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("build/demo"))
    p.add_argument("--memory-of", choices=["eager", "ORTModule"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.seq < 8 or a.dim % a.heads:
        p.error("--seq must be at least 8 and --dim a multiple of --heads")
    if a.memory_of:
        return measure_memory(a.memory_of, a)
    a.out.mkdir(parents=True, exist_ok=True)

    data = corpus(4 << 20)
    ids = batches(data, a.batch, a.seq, a.steps, a.seed)
    arms = [Arm("eager", a), Arm("ORTModule", a)]
    n = sum(p.numel() for p in arms[0].model.parameters())
    print(
        f"GPT-2, {a.layers} layers, {a.dim} wide, {n / 1e6:.1f} M parameters, dropout 0.1; {len(data) / 2**20:.1f} MiB "
        "of Python sources; "
        f"{a.batch} x {a.seq} bytes a step; {torch.get_num_threads()} threads"
    )
    tokens, start, shown = a.batch * a.seq, time.perf_counter(), 0.0
    for i, x in enumerate(ids):
        for arm in arms if i % 2 else arms[::-1]:
            arm.step(x)
        now = time.perf_counter() - start
        if i == 0:
            print(
                f"first step: eager {arms[0].ms[0] / 1e3:.2f} s, ORTModule {arms[1].ms[0] / 1e3:.2f} s (capture and "
                "plan included)"
            )
        if now - shown >= 5 or i + 1 == len(ids):
            shown = now
            med = [sorted(arm.ms[1:] or arm.ms)[len(arm.ms[1:] or arm.ms) // 2] for arm in arms]
            print(
                f"step {i + 1:4d}/{a.steps}  loss eager {arms[0].loss[-1]:.4f}  ORTModule {arms[1].loss[-1]:.4f}   "
                f"tokens/s eager {tokens / med[0] * 1e3:6.0f}  ORTModule {tokens / med[1] * 1e3:6.0f}   memory "
                f"{rss_mib():.0f} MiB",
                flush=True,
            )
    med = [sorted(arm.ms[1:])[len(arm.ms[1:]) // 2] for arm in arms]
    ratios = sorted(e / o for e, o in zip(arms[0].ms[1:], arms[1].ms[1:]))
    picture(arms, a.out / "loss.png")
    print(
        f"\nstep, median: eager {med[0]:.1f} ms, ORTModule {med[1]:.1f} ms; median of the pairs' ratios "
        f"{ratios[len(ratios) // 2]:.2f}x"
    )
    mem = {}
    for arm in arms:
        argv = [sys.executable, __file__, "--memory-of", arm.name]
        for k in ("layers", "dim", "heads", "batch", "seq", "seed"):
            argv += [f"--{k}", str(getattr(a, k))]
        mem[arm.name] = json.loads(
            subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )["step_mib"]
    print(f"step memory (activations, temporaries): eager {mem['eager']:.0f} MiB, ORTModule {mem['ORTModule']:.0f} MiB")
    print("\n" + str(arms[1].model.report()))
    print(f"\nloss curves: {a.out / 'loss.png'}\nsampled from the model trained by ORTModule:\n")
    print(sample(arms[1].model, "def ", min(a.seq - 8, 160)))


if __name__ == "__main__":
    main()
