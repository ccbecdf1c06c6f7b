"""Whole training steps: eager, torch.compile and ORTModule, interleaved in one process, medians of the pairs' ratios.

    make bench                                    # three transformers, fp32, beside eager
    make bench BENCH=all                          # every model, fp32 and bf16, beside eager and torch.compile; an hour
    python tests/bench/bench_models.py gpt2-124m  # one
    python tests/bench/bench_models.py --list
    python tests/bench/bench_models.py bert-narrow g-small --busy 2   # while two other processes compute

A step is forward + loss + backward + AdamW(fused). First step and step memory come from a child process per arm: peak
resident set above the process before its first step, minus 12 bytes per trained parameter (gradient and two moments,
which nobody can save here). Rows are appended to tests/bench/history.csv with the machine's facts. Under each row of
ORTModule: its targets, whether they were reached, and the dearest operators of its step.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import nets  # noqa: E402


@dataclass
class Case:
    make: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    speed: float = 1.0    # target in fp32: eager's time / ours
    memory: float = 1.0   # target: our step memory / eager's
    note: str = ""
    channels_last: bool = False
    half: float = 0.0     # target in bf16 where there are AMX tiles, if it is another


def _lm(vocab: int, b: int, t: int, mask: bool = False, labels: bool = True) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(7)
        ids = torch.randint(vocab, (b, t), generator=g)
        out = {"input_ids": ids}
        if labels:
            out["labels"] = ids.clone()
        if mask:
            out["attention_mask"] = (torch.arange(t)[None] < torch.randint(t // 2, t + 1, (b, 1), generator=g)).long()
        return out

    return make


def _gpt2(**kw):
    def make():
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **kw))
    return make


def _hf(cls: str, cfg: str, **kw):
    def make():
        import transformers
        return getattr(transformers, cls)(getattr(transformers, cfg)(**kw))
    return make


def _t5_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"input_ids": torch.randint(1, 32128, (4, 128), generator=g), "labels": torch.randint(1, 32128, (4, 64), generator=g)}


def _vit_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"pixel_values": torch.randn(4, 3, 224, 224, generator=g), "labels": torch.randint(2, (4,), generator=g)}


def _bart_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"input_ids": torch.randint(4, 50265, (2, 128), generator=g), "labels": torch.randint(4, 50265, (2, 64), generator=g)}


def _whisper_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"input_features": torch.randn(2, 80, 1000, generator=g), "labels": torch.randint(51865, (2, 48), generator=g)}


UNTUNED = "nothing was tuned for it"

CASES: dict[str, Case] = {
    "g-small": Case(_gpt2(n_layer=6, n_embd=384, n_head=6, vocab_size=65, n_positions=256), _lm(65, 12, 256), 1.6, 0.25, half=3.0),
    "gpt2-124m": Case(_gpt2(), _lm(50257, 2, 256), 1.5, 0.35, half=2.5),
    "gpt2-124m-t1024": Case(_gpt2(), _lm(50257, 1, 1024), 2.2, 1.0, "causal, long", half=2.5),
    "bert-base": Case(_hf("BertForMaskedLM", "BertConfig"), _lm(30522, 4, 128), 1.45, 0.75, half=2.0),
    "bert-base-padded": Case(_hf("BertForMaskedLM", "BertConfig"), _lm(30522, 4, 128, mask=True), 1.45, 1.0, half=2.0),
    "bert-narrow": Case(_hf("BertForMaskedLM", "BertConfig", vocab_size=1000, hidden_size=128, num_attention_heads=4, intermediate_size=512),
                        _lm(1000, 2, 40), 0.98, 1.0, "small, many layers"),
    "t5-small": Case(_hf("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0), _t5_batch, 1.45, half=2.0),
    "llama-60m": Case(_hf("LlamaForCausalLM", "LlamaConfig", vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
                          num_attention_heads=8, num_key_value_heads=4), _lm(8000, 4, 256), 1.15, half=1.5),
    "vit-base": Case(_hf("ViTForImageClassification", "ViTConfig"), _vit_batch, 1.15, half=1.5),
    "bart-base": Case(_hf("BartForConditionalGeneration", "BartConfig", d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072,
                          decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12), _bart_batch, 1.2, 1.0,
                      UNTUNED, half=1.5),
    "qwen2-90m": Case(_hf("Qwen2ForCausalLM", "Qwen2Config", vocab_size=32000, hidden_size=640, intermediate_size=1792, num_hidden_layers=10,
                          num_attention_heads=10, num_key_value_heads=2), _lm(32000, 2, 256), 1.2, 1.0, UNTUNED, half=1.5),
    "whisper-tiny": Case(_hf("WhisperForConditionalGeneration", "WhisperConfig", d_model=384, encoder_layers=4, decoder_layers=4,
                             encoder_ffn_dim=1536, decoder_ffn_dim=1536, encoder_attention_heads=6, decoder_attention_heads=6,
                             max_source_positions=500), _whisper_batch, 1.2, 1.0, UNTUNED, half=1.5),
    "resnet50": Case(nets.resnet50, lambda: nets.images(4, 3, 160, 1000), 0.98),
    "resnet50-cl": Case(nets.resnet50, lambda: nets.images(4, 3, 160, 1000), 0.98, 1.0, "channels_last", True),
    "convnext-tiny": Case(nets.convnext_tiny, lambda: nets.images(4, 3, 160, 1000), 0.98),
    "convnext-tiny-cl": Case(nets.convnext_tiny, lambda: nets.images(4, 3, 160, 1000), 0.98, 1.0, "channels_last", True),
    "unet": Case(nets.UNet, lambda: nets.images(2, 3, 128, 4, True), 0.98),
    "unet-cl": Case(nets.UNet, lambda: nets.images(2, 3, 128, 4, True), 0.98, 1.0, "channels_last", True),
    "lstm-lm": Case(nets.LSTMLanguageModel, lambda: nets.tokens(10000, 16, 64), 0.98),
    "mlp": Case(nets.mlp, lambda: nets.images(32, 1, 28, 10), 0.98, 1.0, "small: what the wrapper costs"),
    "tiny-cnn": Case(nets.tiny_cnn, lambda: nets.images(32, 1, 28, 10), 0.98, 1.0, "small"),
    "lstm-classifier": Case(nets.LSTMClassifier, lambda: nets.tokens(2000, 16, 32, 2), 0.98, 1.0, "small"),
    "gpt-tiny": Case(_gpt2(n_layer=2, n_embd=128, n_head=4, vocab_size=256, n_positions=64), _lm(256, 1, 64), 0.98, 1.0, "small, batch 1"),
    "dlrm-tiny": Case(nets.DLRM, lambda: nets.clicks(32), 0.98, 1.0, "small"),
}
QUICK = ["g-small", "gpt2-124m", "bert-base"]
TOP = 6  # operators of a step that are printed


def arm_model(arm: str, case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    m = case.make().train()
    if case.channels_last:
        m = m.to(memory_format=torch.channels_last)
    if arm == "ortmodule":
        from ortmodule import ORTModule
        return ORTModule(m)
    if arm == "compile":
        return torch.compile(m)
    return m


class Stepper:
    def __init__(self, arm: str, case: Case, bf16: bool):
        self.model, self.batch, self.bf16 = arm_model(arm, case), case.batch(), bf16
        if case.channels_last:
            self.batch = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in self.batch.items()}
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> float:
        t = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(**self.batch)[0]
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.loss = loss.item()
        return time.perf_counter() - t


def rss(reset: bool = False) -> float:
    """Peak resident set in MiB since the last reset (getrusage's would include the parent's before exec)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


def child(arm: str, name: str, bf16: bool) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    s = Stepper(arm, case, bf16)
    n = sum(p.numel() for p in s.model.parameters() if p.requires_grad)
    before = rss(reset=True)
    first = s()
    for _ in range(2):
        s()
    print(json.dumps({"first_s": first, "step_mib": rss() - before - n * 12 / 2**20, "loss": s.loss, "params_m": n / 1e6}))


def run_child(arm: str, name: str, bf16: bool) -> dict[str, float]:
    argv = [sys.executable, __file__, name, "--child", arm] + (["--bf16"] if bf16 else [])
    res = subprocess.run(argv, capture_output=True, text=True)
    if res.returncode:
        print(res.stderr[-2000:], file=sys.stderr)
        return {"first_s": float("nan"), "step_mib": float("nan"), "loss": float("nan"), "params_m": float("nan")}
    return json.loads(res.stdout.splitlines()[-1])


def machine() -> dict[str, str]:
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    isa = "avx512_bf16" if "avx512_bf16" in flags else "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "generic"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    if family := re.search(r"^cpu family\s*: (\d+)\nmodel\s*: (\d+)", Path("/proc/cpuinfo").read_text(), re.M):
        cpu += f" ({family[1]}/{family[2]})"  # names alone do not tell generations apart
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "cpu": cpu, "isa": isa, "threads": str(torch.get_num_threads()),
            "torch": torch.__version__}


def median(xs: list[float]) -> float:
    return sorted(xs)[len(xs) // 2]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for p in busy:
            p.kill()
            p.wait()


def bench(name: str, arms: list[str], steps: int, bf16: bool, memory: bool, busy: int = 0) -> list[dict[str, str]]:
    case = CASES[name]
    steppers, first = {}, {}
    for a in arms:
        try:
            steppers[a] = Stepper(a, case, bf16)
            first[a] = steppers[a]()
            steppers[a]()
        except Exception as e:
            if a != "compile":
                raise
            del steppers[a]
            print(f"{name:18s} compile cannot run it: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", flush=True)
    arms = list(steppers)
    times: dict[str, list[float]] = {a: [] for a in arms}
    with neighbours(busy):
        for i in range(steps):
            for a in arms if i % 2 else arms[::-1]:
                times[a].append(steppers[a]())
    rows = []
    title = f"{name} beside {busy}" if busy else name
    facts = machine()
    side = {a: run_child(a, name, bf16) for a in arms} if memory else {}
    for a in arms:
        ratio = median([e / o for e, o in zip(times["eager"], times[a])])
        row = {**facts, "model": title, "dtype": "bf16" if bf16 else "fp32", "arm": a, "step_s": f"{median(times[a]):.4f}", "x_eager": f"{ratio:.3f}",
               "first_s": f"{side.get(a, {}).get('first_s', first[a]):.2f}", "step_mib": f"{side[a]['step_mib']:.0f}" if a in side else "",
               "x_memory": f"{side[a]['step_mib'] / side['eager']['step_mib']:.2f}" if a in side else "",
               "loss": f"{steppers[a].loss:.5f}"}
        rows.append(row)
        print(f"{title:18s} {row['dtype']} {a:10s} step {float(row['step_s']) * 1e3:8.1f} ms  {ratio:5.2f}x eager   first {row['first_s']:>6s} s   "
              f"step memory {row['step_mib']:>5s} MiB ({row['x_memory'] or '-'}x)   loss {row['loss']}", flush=True)
        if a == "ortmodule":
            print("\n".join(f"    {line}" for line in [verdict(case, row), *dearest(steppers[a])]), flush=True)
    return rows


def verdict(case: Case, row: dict[str, str]) -> str:
    """Targets and whether they were reached. bf16 is aimed higher where there are AMX tiles, else it is fp32's."""
    tiles = row["dtype"] == "bf16" and "amx_bf16" in Path("/proc/cpuinfo").read_text()
    speed = case.half if tiles and case.half else case.speed
    parts = [("speed", f">= {speed:.2f}x", float(row["x_eager"]) >= speed)]
    if row["x_memory"]:
        parts.append(("step memory", f"<= {case.memory:.2f}x", float(row["x_memory"]) <= case.memory))
    return "target " + ", ".join(f"{what} {goal} {'reached' if held else 'MISSED'}" for what, goal, held in parts)


def dearest(stepper: Stepper) -> list[str]:
    """The dearest operators of a step and their share of what the engine computes."""
    profile = stepper.model.profile(stepper, steps=2)
    sums: dict[str, float] = {}
    for r in profile.rows:
        key = f"{r.phase} {r.what.partition('(')[0]}{' in PyTorch' * (r.kind == 'host')}"
        sums[key] = sums.get(key, 0.0) + r.share
    top = sorted(sums.items(), key=lambda item: -item[1])[:TOP]
    return ["of the step: " + ", ".join(f"{what} {share:.0%}" for what, share in top)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="*", help=f"default: {' '.join(QUICK)}; 'all' = every case, both types, all arms")
    p.add_argument("--arms", help="comma separated: eager (always), ortmodule, compile; default: eager,ortmodule")
    p.add_argument("--steps", type=int, default=7, help="timed steps of each arm, interleaved")
    p.add_argument("--bf16", action="store_true", help="under torch.autocast(bfloat16)")
    p.add_argument("--fp32", action="store_true", help="as it is (default); with --bf16: both")
    p.add_argument("--busy", type=int, default=0, metavar="N", help="take the times while N other processes compute")
    p.add_argument("--no-memory", action="store_true", help="skip the child processes")
    p.add_argument("--no-history", action="store_true", help="do not append to history.csv")
    p.add_argument("--list", action="store_true")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.list:
        return print("\n".join(f"{k:18s} {v.note}" for k, v in CASES.items()))
    if a.child:
        return child(a.child, a.models[0], a.bf16)
    every = a.models == ["all"]
    names = list(CASES) if every else a.models or QUICK
    if bad := [n for n in names if n not in CASES]:
        p.error(f"unknown model {bad[0]!r}: choose from {', '.join(CASES)}")
    wanted = (a.arms or ("compile,ortmodule" if every else "ortmodule")).split(",")
    if bad := [x for x in wanted if x not in ("eager", "compile", "ortmodule")]:
        p.error(f"unknown arm {bad[0]!r}: choose from eager, compile, ortmodule")
    arms = ["eager"] + [x for x in wanted if x != "eager"]
    types = [bf16 for bf16, asked in ((False, a.fp32 or not a.bf16), (True, a.bf16)) if asked or (every and a.fp32 == a.bf16)]
    path = HERE / "history.csv"
    for n, bf16 in ((n, bf16) for n in names for bf16 in types):
        rows = bench(n, arms, a.steps, bf16, not a.no_memory, a.busy)
        if not a.no_history:
            new = not path.exists()
            with open(path, "a", newline="") as f:
                w = csv.DictWriter(f, rows[0].keys())
                if new:
                    w.writeheader()
                w.writerows(rows)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
