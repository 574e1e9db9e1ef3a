"""Random .param texts that ncnn can run, with everything that its format allows and our writer would never write."""

from random import Random

import numpy as np

from onnx2ncnn_opt.ir.weight import Array

SHAPE = (2, 3, 4)
CHANNELS, HEIGHT, WIDTH = SHAPE

# Layers from one blob of SHAPE to another, with parameters in every style.
UNARY = (
    "ReLU",
    "ReLU 0=0.125",
    "ReLU 0=1",  # an integer for a float
    "ReLU 0=0.5 0=2.5e-1",  # the last one counts
    "ReLU 0=0.5 0=nan",  # which is a string, so the default counts
    "AbsVal 29=7 -23328=2,1,2",  # unknown ids
    'AbsVal 27=0.1 26="some text" 25=1.5,2.5',
    "UnaryOp 0=1",
    "UnaryOp 0=4",
    "UnaryOp 0=4.0",  # a float for an integer: its default
    "UnaryOp\t0=17 31=1",
    "BinaryOp 0=2 1=1 2=1.000000059604645",
    "BinaryOp 0=0\t1=1   2=-.3e-3",
    "BinaryOp 0=7 1=1 2=+3",
    "Clip 0=-0.7 1=0.7",
    "Clip",
    "Dropout 0=0.3333333433",
    "Noop",
    "Swish",
    "Softmax 0=1 1=1",
    "ELU 0=16777217",
    f"Permute 0=0 30=3,{WIDTH},{HEIGHT},{CHANNELS}",
    f"Flatten -23330=4,1,{WIDTH},1,1",  # a wrong hint
    f"TanH -23330=5,3,{WIDTH},{HEIGHT},1,{CHANNELS}",
    'Reshape 6="0w,0h, 0c"',
    "Reshape 6=max(0w,0w),0h,-1",
    f"Reshape 0={WIDTH} 1={HEIGHT} 2=-1 5=3",
    "Crop -23309=1,0 -23310=1,-233 -23311=1,0",
    "Crop 9=0, 10=-233, 11=0,",
    "Padding 0=0 4=0 5=2",
)
BINARY = (
    "BinaryOp",
    "BinaryOp 0=2",
    "BinaryOp 0=4 2=9.0",
    "Eltwise 0=1",
    "Eltwise 0=1 1=0.5,2",
    "Eltwise 0=1 1=1,2",  # integers for floats
    "Eltwise 0=1 -23301=2,-1.5,1e-3",
    "Eltwise 0=1 -23301=2,3,-2",
    "Eltwise 0=2",
)


class Net:
    """A .param text, its .bin, and the blobs that nothing has consumed yet."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.bits = rng, np.random.default_rng(rng.getrandbits(32))
        self.lines: list[str] = []
        self.tops = 0
        self.weights = b""
        self.open: list[str] = []
        self.inputs = [f"in{i}" for i in range(rng.randint(1, 2))]
        if rng.random() < 0.5:
            self.add("Input", [], self.inputs)
        else:
            for name in self.inputs:
                self.add(f"Input 0={WIDTH} 1={HEIGHT} 2={CHANNELS}", [], [name])
        for _ in range(rng.randint(1, 12)):
            self.grow()

    def add(self, layer: str, bottoms: list[str], tops: list[str]) -> None:
        type, *params = layer.split(maxsplit=1)
        gap = self.rng.choice((" ", "  ", "\t"))
        words = [type, f"layer{self.rng.randint(0, 5)}", str(len(bottoms)), str(len(tops)), *bottoms, *tops, *params]
        self.lines.append(gap.join(words))
        self.tops += len(tops)
        self.open = [name for name in self.open if name not in bottoms] + tops

    def new(self, count: int = 1) -> list[str]:
        return [f"{self.rng.choice('abc')}{self.tops + i}" for i in range(count)]

    def grow(self) -> None:
        rng = self.rng
        some = rng.sample(self.open, len(self.open))
        kind = rng.random()
        if kind < 0.3:
            self.add("Split", some[:1], self.new(rng.choice((1, 2, 2, 3))))
        elif kind < 0.55:
            layer = rng.choice(UNARY)
            self.add(layer, some[:1], self.new())
            if layer.startswith("Flatten"):
                self.add(f"Reshape 0={WIDTH} 1={HEIGHT} 2={CHANNELS}", self.open[-1:], self.new())
        elif kind < 0.7:
            self.add(rng.choice(BINARY), (some * 2)[:2], self.new())
        elif kind < 0.75:
            self.add("Noop", some[:2], self.new(len(some[:2])))
        elif kind < 0.8:
            self.add(f"MemoryData 0={WIDTH} 1={HEIGHT} 2={CHANNELS}", [], self.new())
            self.weights += self.numbers(*SHAPE).tobytes()
        else:
            self.add(*self.weighted(), some[:1], self.new())

    def weighted(self) -> tuple[str]:
        """Write the weights of a random layer, and return its line."""
        kind = self.rng.choice(("Bias", "Scale", "BatchNorm", "PReLU", "Convolution", "Convolution", "Convolution"))
        if kind == "Convolution":
            bias = self.rng.randint(0, 1)
            kernel = self.numbers(CHANNELS, CHANNELS, 3, 3)
            self.weights += self.stored(kernel) + self.numbers(CHANNELS * bias).tobytes()
            style = self.rng.choice(("9=2 10=0.1,", "9=2 -23310=1,0.1", "9=3 10=-0.5,0.5", "9=1.0 14=1 4=1", ""))
            return (f"Convolution 0={CHANNELS} 1=3 4=1 5={bias} 6={kernel.size} {style}".rstrip(),)
        if kind == "Scale":
            self.weights += self.numbers(2 * CHANNELS).tobytes()
            return (f"Scale 0={CHANNELS} 1=1",)
        if kind == "BatchNorm":
            self.weights += np.abs(self.numbers(4 * CHANNELS)).tobytes()
            return (f"BatchNorm 0={CHANNELS} 1=1e-3",)
        self.weights += self.numbers(CHANNELS).tobytes()
        return (f"{kind} 0={CHANNELS}",)

    def numbers(self, *shape: int) -> Array:
        return self.bits.standard_normal(shape, np.float32)

    def stored(self, values: Array) -> bytes:
        """Return a weight after a tag, in a random encoding."""
        kind = self.rng.choice(("fp32", "flagged", "fp16", "bf16", "table"))
        if kind == "fp16":
            data = bytes.fromhex("476b3001") + values.astype("<f2").tobytes()
        elif kind == "bf16":
            data = bytes.fromhex("838b3401") + (values.view("<u4") >> 16).astype("<u2").tobytes()
        elif kind == "table":
            indexes = self.bits.integers(0, 256, values.size, np.uint8)
            data = bytes.fromhex("01000000") + self.numbers(256).tobytes() + indexes.tobytes()
        else:
            data = bytes.fromhex("56c00200" if kind == "flagged" else "00000000") + values.tobytes()
        return data + bytes(-len(data) % 4)

    @property
    def text(self) -> bytes:
        """The file, with a blob count that may be too large, blank lines, and either kind of line ends."""
        lines = ["7767517", f"{len(self.lines)} {self.tops + self.rng.choice((0, 0, 5))}", *self.lines]
        if self.rng.random() < 0.3:
            lines.insert(self.rng.randint(0, len(lines)), "")
        return (self.rng.choice(("\n", "\r\n")).join(lines) + self.rng.choice(("", "\n"))).encode()
