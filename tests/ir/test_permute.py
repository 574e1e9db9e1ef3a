"""The order types of Permute, against the data that ncnn moves."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.permute import order_type, permutation
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.handmade import write_net


def test_every_order_moves_the_data_as_said(tmp_path: Path, worker: NcnnWorker) -> None:
    for rank in (1, 2, 3, 4):
        x = np.arange(np.prod(range(2, rank + 2)), dtype=np.float32).reshape(range(2, rank + 2))
        for perm in permutations(range(rank)):
            order = order_type(perm)
            assert permutation(order, rank) == perm
            paths = write_net(tmp_path, "Input x 0 1 x", f"Permute y 1 1 x y 0={order}")
            runner = NcnnRunner(*paths, worker=worker)
            np.testing.assert_array_equal(runner.run({"x": x})["y"], x.transpose(perm))


def test_a_vector_is_unchanged() -> None:
    assert permutation(17, 1) == (0,)


@pytest.mark.parametrize(("order", "rank"), [(2, 2), (6, 3), (24, 4), (-1, 3), (0, 5), (0, 0)])
def test_orders_that_do_not_exist(order: int, rank: int) -> None:
    with pytest.raises(GraphError, match="no order_type"):
        permutation(order, rank)


@pytest.mark.parametrize("perm", [(), (0, 0), (1, 2), (0, 1, 2, 3, 4), (-1, 0)])
def test_orders_that_are_no_permutation(perm: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match="not a permutation"):
        order_type(perm)
