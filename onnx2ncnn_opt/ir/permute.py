"""The `order_type` of ncnn's Permute: the number of a permutation."""

from collections.abc import Sequence
from itertools import permutations

from onnx2ncnn_opt.errors import GraphError

# ncnn counts the permutations of each rank in the lexicographic order of their numpy form; a 1-D blob stays as it is.
_ORDERS = {rank: tuple(permutations(range(rank))) for rank in range(1, 5)}


def permutation(order_type: int, rank: int) -> tuple[int, ...]:
    """Return the numpy permutation that Permute does on a blob of this rank: output axis i is input axis result[i].

    GraphError if ncnn has no such order for the rank.
    """
    if rank == 1:
        return (0,)
    if rank not in _ORDERS or not 0 <= order_type < len(_ORDERS[rank]):
        raise GraphError(f"Permute has no order_type {order_type} for {rank}-D blobs")
    return _ORDERS[rank][order_type]


def inverted(perm: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that moves axes back."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


def order_type(perm: Sequence[int]) -> int:
    """Return the order_type for a numpy permutation of 1 to 4 axes; GraphError if ncnn has none."""
    try:
        return _ORDERS[len(perm)].index(tuple(perm))
    except (KeyError, ValueError):
        raise GraphError(f"Permute cannot do {tuple(perm)}: not a permutation of 1 to 4 axes") from None
