"""What a step of data-parallel training costs on N devices, on paper: compute, communication, memory by ZeRO stage.

python examples/recipes/cost_model.py --layers 24 --width 1024 --length 512 --batch 8 --flops 150e12 --bandwidth 25e9

P parameters, b rows of T tokens a device and micro-batch, L layers of width d, a heads, V words, N devices.

parameters  P = L (12 d^2 + 13 d) + (V + T) d + 2 d: a GPT-2, whose head is its embedding
compute     6 P + 12 L d T operations a token, backward twice forward (Kaplan et al. 2020, section 2.1, with the
            products of attention), over --flops x --share
traffic     a pass (reduce-scatter or all-gather) of n bytes sends (N - 1) / N n in N - 1 hops (Patarasuk and Yuan
            2009); n is a gradient's bytes x P. A step of m micro-batches makes 2 passes with ZeRO-0 and -1, m + 1 with
            -2 (each micro-batch is reduced, weights are gathered once), 3 m with -3 (Rajbhandari et al. 2020, 7)
overlap     exposed is what backward, 2/3 of a micro-batch's compute, does not hide of the passes beside it: both with
            ZeRO-0, the reduction with -1 and -2, whose gathering follows the optimizer; with ZeRO-3, which gathers for
            forward as well, what the whole micro-batch does not hide
memory      weights w, gradients g, optimizer k bytes a parameter (2, 2, 12 with Adam and masters; 4, 4, 8 in fp32):
            w + g + k, with ZeRO-1 w + g + k / N, -2 w + (g + k) / N, -3 (w + g + k) / N (Rajbhandari, section 3)
activations L T b d 34 bytes in 16 bits with attention by tiles, nothing computed again (Korthikanti et al. 2022,
            section 4, without the 5 a T / d); twice that in fp32
Two processes, tests/scale/test_cost_model.py: memory and traffic are these bytes; activations are what autograd keeps,
to a fifth; a step takes what these times say, to a factor of two. They are as good as the rates given.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    length: int
    words: int
    tiled: bool = True

    @property
    def parameters(self) -> int:
        d = self.width
        return self.layers * (12 * d * d + 13 * d) + (self.words + self.length) * d + 2 * d

    @property
    def operations(self) -> float:
        """Of a token."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.length


@dataclass(frozen=True)
class Bytes:
    """A parameter's."""

    weight: int
    gradient: int
    optimizer: int


MIXED, SINGLE = Bytes(2, 2, 12), Bytes(4, 4, 8)


def memory(parameters: float, each: Bytes, stage: int, devices: int) -> float:
    """Bytes on a device for weights, gradients and the optimizer."""
    shares = [each.optimizer, each.gradient, each.weight]
    return parameters * sum(b / devices if i < stage else b for i, b in enumerate(shares))


def passes(stage: int, accumulate: int) -> int:
    """Times that a step reduces or gathers all parameters."""
    return (2, 2, accumulate + 1, 3 * accumulate)[stage]


def traffic(parameters: float, each: Bytes, stage: int, devices: int, accumulate: int = 1) -> float:
    """Bytes that a device sends in a step."""
    return passes(stage, accumulate) * (devices - 1) / devices * parameters * each.gradient


def activations(model: Model, batch: int, each: Bytes) -> float:
    a_layer = 34 + (0 if model.tiled else 5 * model.heads * model.length / model.width)
    return model.layers * model.length * batch * model.width * a_layer * each.weight / 2


def step(
    model: Model,
    batch: int,
    accumulate: int,
    each: Bytes,
    stage: int,
    devices: int,
    flops: float,
    bandwidth: float,
    latency: float,
) -> tuple[float, float, float]:
    """Seconds: compute, communication, and what of that is exposed."""
    micro = batch * model.length * model.operations / flops
    talk = traffic(model.parameters, each, stage, devices, accumulate) / bandwidth
    talk += passes(stage, accumulate) * (devices - 1) * latency
    a_pass = talk / passes(stage, accumulate)
    backward = micro * 2 / 3
    exposed = (
        max(2 * a_pass - backward, 0),
        max(a_pass - backward, 0) + a_pass,
        max(a_pass - backward, 0) * accumulate + a_pass,
        max(3 * a_pass - micro, 0) * accumulate,
    )
    return micro * accumulate, talk, exposed[stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 24,
        "width": 1024,
        "heads": 16,
        "length": 512,
        "words": 50257,
        "batch": 8,
        "accumulate": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--flops", type=float, default=300e12, help="of a device, at its best")
    parser.add_argument("--share", type=float, default=0.4, help="of it that a step reaches")
    parser.add_argument("--bandwidth", type=float, default=25e9, help="bytes a second between devices")
    parser.add_argument("--latency", type=float, default=10e-6, help="seconds a hop")
    parser.add_argument("--devices", default="8,16,32,64,128,256,512,1024")
    args = parser.parse_args()
    model = Model(args.layers, args.width, args.heads, args.length, args.words)
    each = SINGLE if args.fp32 else MIXED
    kept = activations(model, args.batch, each)
    print(f"{model.parameters / 1e6:.0f} M parameters, {kept / 2**30:.2f} GiB of activations a device")
    names = ("devices", "stage", "compute ms", "talk ms", "exposed ms", "rows/s", "scaling", "GiB")
    print("".join(f"{name:>11}" for name in names))
    for devices in map(int, args.devices.split(",")):
        for stage in STAGES:
            compute, talk, exposed = step(
                model,
                args.batch,
                args.accumulate,
                each,
                stage,
                devices,
                args.flops * args.share,
                args.bandwidth,
                args.latency,
            )
            rows = devices * args.batch * args.accumulate / (compute + exposed)
            space = (memory(model.parameters, each, stage, devices) + kept) / 2**30
            found = [str(devices), str(stage), *(f"{1e3 * t:.1f}" for t in (compute, talk, exposed)), f"{rows:.0f}"]
            print("".join(f"{x:>11}" for x in (*found, f"{compute / (compute + exposed):.0%}", f"{space:.2f}")))


if __name__ == "__main__":
    main()
