"""Convert torch's own formats: modules, exported programs and .pt2 files. Needs torch and onnxscript, unlike tests.

    python -m scripts.try_torch

Every case is converted and verified against ONNX Runtime; the last line counts them.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error


class Net(torch.nn.Module):  # type: ignore[misc]
    """A convolution, a buffer, and an output that depends on a dynamic size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4, 5)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, image: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """image [n, 3, h, w], bias [5] -> [n, 5]."""
        x = self.conv(image) * self.scale[None, :, None, None]
        return self.linear(x.mean((2, 3))) + bias * image.shape[2]


class Recurrent(torch.nn.Module):  # type: ignore[misc]
    """An LSTM with a projection, which torch's exporter does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, proj_size=5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [7, n, 6] -> [7, n, 5]."""
        return self.lstm(image)[0]


def main() -> int:
    """Run all cases; 1 where one is wrong."""
    net: Any = Net()
    net.eval()
    training: Any = Net()
    example = (torch.randn(2, 3, 16, 16), torch.randn(5))
    dynamic = {"image": {0: torch.export.Dim("batch"), 2: torch.export.Dim("h")}, "bias": None}
    program = torch.export.export(net, example, dynamic_shapes=dynamic)
    recurrent = torch.export.export(Recurrent().eval(), (torch.randn(7, 1, 6),))
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.pt2"
        torch.export.save(program, path)
        cases: dict[str, Callable[[], Conversion]] = {
            "module": lambda: lower(net, inputs=example),
            "module, inputs by name": lambda: lower(net, inputs={"image": example[0], "bias": example[1]}),
            "module, dynamic": lambda: lower(net, inputs=example, dynamic_shapes=dynamic),
            "program": lambda: lower(program),
            "file": lambda: lower(path),
            "file, bound": lambda: lower(path, shapes={"image": (1, 3, 32, None)}),
            "LSTM with a projection": lambda: lower(recurrent),
        }
        for name, made in cases.items():
            conversion = made()
            conversion.verify().check()
            shape = conversion.manifest().inputs[0].shape
            is_open = any(isinstance(size, str) for size in shape)
            assert is_open == (name in ("module, dynamic", "program", "file")), (name, shape)
            print(f"{name}: right, {len(conversion.graph)} layers, image {list(shape)}")
            done += 1
        wrong: dict[str, Callable[[], Conversion]] = {
            "module without inputs": lambda: lower(net),
            "module in training": lambda: lower(training, inputs=example),
            "module that fails": lambda: lower(net, inputs=example[:1]),
            "inputs of a program": lambda: lower(program, inputs=example),
        }
        for name, attempt in wrong.items():
            try:
                attempt()
            except Error as error:
                print(f"{name}: {type(error).__name__}: {error}")
                done += 1
    print(f"{done} of 11 cases as they should be")
    return int(done != 11)


if __name__ == "__main__":
    sys.exit(main())
