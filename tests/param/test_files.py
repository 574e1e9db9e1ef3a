"""Nets on disk: both files or neither, the same files every time, and broken ones refused quickly."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.errors import ConversionError, GraphError, ParamError, UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.binary import load_weights
from onnx2ncnn_opt.param.files import all_or_nothing, read_net, write_net
from onnx2ncnn_opt.param.text import format_param, parse_param
from testing.param_text import one_layer
from testing.random_nets import random_graph
from testing.runnable_nets import Net


def folder_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def graph_with_weights() -> Graph:
    return one_layer("Bias", {"bias_data_size": 2}, {"bias_data": np.ones(2)})


def test_writing_and_reading(tmp_path: Path) -> None:
    graph = graph_with_weights()
    names = write_net(graph, tmp_path / "net.param", tmp_path / "net.bin")
    assert names == {graph.inputs[0]: "x"}
    assert set(folder_of(tmp_path)) == {"net.param", "net.bin"}
    loaded = read_net(tmp_path / "net.param", str(tmp_path / "net.bin"))
    assert loaded.graph.layers[1].weights["bias_data"].tolist() == [1, 1]
    assert (loaded.dropped_splits, loaded.trailing_bytes) == ((), 0)


def test_the_same_graph_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_net(random_graph(Random(5)), tmp_path / name / "net.param", tmp_path / name / "net.bin")
    assert folder_of(tmp_path / "one") == folder_of(tmp_path / "two")


def test_a_net_can_be_written_over_itself(tmp_path: Path) -> None:
    """Its weights are still in the old file while the new one is written."""
    paths = tmp_path / "net.param", tmp_path / "net.bin"
    write_net(graph_with_weights(), *paths)
    before = folder_of(tmp_path)
    write_net(read_net(*paths).graph, *paths)
    assert folder_of(tmp_path) == before


def test_a_failure_leaves_the_old_files(tmp_path: Path) -> None:
    paths = tmp_path / "net.param", tmp_path / "net.bin"
    write_net(graph_with_weights(), *paths)
    before = folder_of(tmp_path)
    broken = graph_with_weights()
    broken.layers[1].weights["bias_data"] = np.ones(3)
    with pytest.raises(GraphError):
        write_net(broken, *paths)
    assert folder_of(tmp_path) == before


def test_a_net_that_would_crash_ncnn_is_not_written(tmp_path: Path) -> None:
    graph = graph_with_weights()
    graph.add(Layer("MatMul", "product", graph.inputs, [Blob("z")]))
    with pytest.raises(GraphError, match="MatMul 'product' has 1 inputs, needs 2"):
        write_net(graph, tmp_path / "net.param", tmp_path / "net.bin")
    assert folder_of(tmp_path) == {}


def test_an_exception_in_between_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with all_or_nothing(tmp_path / "a", tmp_path / "b") as (a, b):
            a.write_text("1")
            b.write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert folder_of(tmp_path) == {}


ENTERED = """
import gc
from onnx2ncnn_opt.param.files import all_or_nothing
manager = all_or_nothing("a")
manager.cycle = [manager]
(staged,) = manager.__enter__()
staged.touch()
gc.freeze()
raise KeyboardInterrupt
"""


def test_an_interrupt_before_the_block_is_known_leaves_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join([os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ended = subprocess.run(
        [sys.executable, "-c", ENTERED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True
    )
    assert ended.stderr.endswith(b"KeyboardInterrupt\n")
    assert folder_of(tmp_path) == {}


def test_a_signal_between_two_renames_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the files would be a mixture of two nets."""
    replace, before = os.replace, signal.getsignal(signal.SIGINT)

    def interrupted(part: Path, target: Path) -> None:
        replace(part, target)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_net(graph_with_weights(), tmp_path / "net.param", tmp_path / "net.bin")
    assert set(folder_of(tmp_path)) == {"net.param", "net.bin"}
    assert signal.getsignal(signal.SIGINT) is before


def test_files_are_replaced_in_another_thread(tmp_path: Path) -> None:
    """Python allows handlers of signals in the main thread only."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_net, graph_with_weights(), tmp_path / "net.param", tmp_path / "net.bin").result()
    assert set(folder_of(tmp_path)) == {"net.param", "net.bin"}


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, is_there in (("a", True), ("b", False)):
        if is_there:
            (tmp_path / "real" / name).write_text("old")
        (tmp_path / name).symlink_to(tmp_path / "real" / name)
    with all_or_nothing(tmp_path / "a", tmp_path / "b") as staged:
        for path in staged:
            path.write_text("new")
    assert all((tmp_path / name).is_symlink() for name in "ab")
    assert folder_of(tmp_path / "real") == dict.fromkeys("ab", b"new")


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    """As is /dev/null, which would otherwise become a file for all programs."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit((tmp_path / "pipe").read_text)
        with all_or_nothing(tmp_path / "pipe", tmp_path / "a") as staged:
            for path in staged:
                path.write_text("new")
        assert found.result() == "new"
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "a").read_text() == "new"


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(UsageError, match=rf"cannot write .*net.param and .*net.bin: {reason}"):
            write_net(graph_with_weights(), folder / "net.param", folder / "net.bin")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ParamError, match=r"none.param: cannot be read: No such file or directory"):
        read_net(tmp_path / "none.param", tmp_path / "none.bin")
    with pytest.raises(ParamError, match=r"cannot be read: Is a directory"):
        read_net(tmp_path, tmp_path / "none.bin")
    huge = tmp_path / "huge.param"
    huge.touch()
    os.truncate(huge, 1 << 40)
    with pytest.raises(ParamError, match=r"huge.param: 1099511627776 bytes are too many"):
        read_net(huge, tmp_path / "none.bin")


def test_a_large_bin_is_not_read_into_memory(tmp_path: Path) -> None:
    """A sparse file of 8 GB."""
    count = 2**31 - 1
    (tmp_path / "net.param").write_text(
        "7767517\n2 2\nInput in 0 1 x\n" + f"InnerProduct i 1 1 x y 0=1 2={2**31 - 1}\n"
    )
    (tmp_path / "net.bin").touch()
    os.truncate(tmp_path / "net.bin", 4 + 4 * count)
    loaded = read_net(tmp_path / "net.param", tmp_path / "net.bin")
    assert loaded.graph.layers[1].weights.stored("weight_data").data.size == count


def test_a_long_net_takes_linear_time(tmp_path: Path) -> None:
    count = 10_000
    lines = [f"ReLU r{i} 1 1 x{i} x{i + 1}" for i in range(count)]
    text = f"7767517\n{count + 1} {count + 1}\nInput in 0 1 x0\n" + "\n".join(lines)
    start = time.process_time()
    assert format_param(parse_param(text).graph).count("\n") == count + 3
    assert time.process_time() - start < 5


def outcome(text: bytes, weights: bytes) -> None:
    """A graph that can be written, or one error that fits on the screen."""
    message = "none"
    try:
        graph = parse_param(text).graph
        load_weights(graph, np.frombuffer(weights, np.uint8))
        format_param(graph)
    except ConversionError as error:
        message = str(error)
    assert 0 < len(message) < 1000


def test_a_param_cut_off_anywhere() -> None:
    for seed in range(8):
        net = Net(Random(seed))
        for size in range(len(net.text)):
            outcome(net.text[:size], net.weights)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 2000), st.sampled_from("ridx"), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_param_with_random_bytes(seed: int, edits: list[tuple[int, str, int]]) -> None:
    net = Net(Random(seed))
    text = bytearray(net.text)
    for position, kind, byte in edits:
        at = position % len(text)
        if kind == "r":
            text[at] = byte
        elif kind == "d":
            del text[at]
        else:
            text.insert(at, byte if kind == "i" else b'0123456789-.,="e \n'[byte % 18])
    outcome(bytes(text), net.weights)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_net_of_any_layers_with_a_random_bin(seed: int, position: int, noise: bytes) -> None:
    text = format_param(random_graph(Random(seed))).encode()
    outcome(text, noise * position)


def test_drafts_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [tmp_path / f".net[1].{suffix}.{ended.pid}.part" for suffix in ("param", "bin")]
    other = tmp_path / f".net[1].param.{os.getppid()}.part"  # a run that goes on
    stranger = tmp_path / f".net[1].param.old.{ended.pid}.part"
    for path in (*left, other, stranger):
        path.write_text("half")
    with all_or_nothing(tmp_path / "net[1].param", tmp_path / "net[1].bin") as staged:
        for path in staged:
            path.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"net[1].param", "net[1].bin", other.name, stranger.name}
