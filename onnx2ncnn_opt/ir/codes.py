"""The codes of ncnn's parameters: the meaning of the numbers of `op_type`, `activation_type` and the like.

The tables of `layers.py` name the enum of each parameter. A member is an int, and is written as one.
"""

from __future__ import annotations

from enum import IntEnum


class Activation(IntEnum):
    """`activation_type` of convolutions and InnerProduct: the function that follows the sum."""

    NONE = 0
    RELU = 1
    LEAKYRELU = 2
    CLIP = 3
    SIGMOID = 4
    MISH = 5
    HARDSWISH = 6


class BinaryOp(IntEnum):
    """`op_type` of BinaryOp. The R of RSUB and others says that the operands are exchanged: b - a."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    MAX = 4
    MIN = 5
    POW = 6
    RSUB = 7
    RDIV = 8
    RPOW = 9
    ATAN2 = 10
    RATAN2 = 11
    FMOD = 12
    RFMOD = 13
    LOGADDEXP = 14
    FLOOR_DIVIDE = 15
    RFLOOR_DIVIDE = 16
    REMAINDER = 17
    RREMAINDER = 18

    @property
    def exchanged(self) -> BinaryOp:
        """The operation that gives the same result with the operands exchanged."""
        return _EXCHANGED.get(self, self)

    @property
    def commutes(self) -> bool:
        """True if the order of the operands does not matter."""
        return self.exchanged is self


_PAIRS = {
    BinaryOp.SUB: BinaryOp.RSUB,
    BinaryOp.DIV: BinaryOp.RDIV,
    BinaryOp.POW: BinaryOp.RPOW,
    BinaryOp.ATAN2: BinaryOp.RATAN2,
    BinaryOp.FMOD: BinaryOp.RFMOD,
    BinaryOp.FLOOR_DIVIDE: BinaryOp.RFLOOR_DIVIDE,
    BinaryOp.REMAINDER: BinaryOp.RREMAINDER,
}
_EXCHANGED = {**_PAIRS, **{second: first for first, second in _PAIRS.items()}}


class Eltwise(IntEnum):
    """`op_type` of Eltwise."""

    PROD = 0
    SUM = 1
    MAX = 2


class UnaryOp(IntEnum):
    """`op_type` of UnaryOp. ROUND takes halves to the even number."""

    ABS = 0
    NEG = 1
    FLOOR = 2
    CEIL = 3
    SQUARE = 4
    SQRT = 5
    RSQRT = 6
    EXP = 7
    LOG = 8
    SIN = 9
    COS = 10
    TAN = 11
    ASIN = 12
    ACOS = 13
    ATAN = 14
    RECIPROCAL = 15
    TANH = 16
    LOG10 = 17
    ROUND = 18
    TRUNC = 19
    SIGN = 20
    EXPM1 = 21
    SINH = 22
    ASINH = 23
    COSH = 24
    ACOSH = 25
    ATANH = 26
    LOG1P = 27


class Reduction(IntEnum):
    """`operation` of Reduction."""

    SUM = 0
    ASUM = 1
    SUMSQ = 2
    MEAN = 3
    MAX = 4
    MIN = 5
    PROD = 6
    L1 = 7
    L2 = 8
    LOGSUM = 9
    LOGSUMEXP = 10


class Pooling(IntEnum):
    """`pooling_type` of Pooling."""

    MAX = 0
    AVG = 1


class PadMode(IntEnum):
    """`pad_mode` of Pooling: the number of windows, and who pads."""

    FULL = 0  # rounds up
    VALID = 1  # rounds down
    SAME_UPPER = 2
    SAME_LOWER = 3


class Padding(IntEnum):
    """`type` of Padding, and `pad_type` of Spectrogram."""

    CONSTANT = 0
    REPLICATE = 1
    REFLECT = 2


class Interp(IntEnum):
    """`resize_type` of Interp."""

    NEAREST = 1
    BILINEAR = 2
    BICUBIC = 3


class Sample(IntEnum):
    """`sample_type` of GridSample."""

    BILINEAR = 1
    NEAREST = 2
    BICUBIC = 3


class SamplePadding(IntEnum):
    """`padding_mode` of GridSample: the values read outside the image."""

    ZEROS = 1
    BORDER = 2
    REFLECTION = 3


class Direction(IntEnum):
    """`direction` of LSTM, GRU and RNN."""

    FORWARD = 0
    REVERSE = 1
    BIDIRECTIONAL = 2


class EpsMode(IntEnum):
    """`eps_mode` of Normalize: the term that keeps the divisor from 0, for a sum of squares s."""

    SUM_PLUS = 0  # sqrt(s + eps)
    MAX_ROOT = 1  # max(sqrt(s), eps)
    MAX_SUM = 2  # sqrt(max(s, eps))


class GemmC(IntEnum):
    """`constant_broadcast_type_C` of Gemm: the shape of C for a result of M rows and N columns."""

    NONE = -1
    SCALAR = 0
    M = 1  # one number for each row
    M_1 = 2  # the same as a column
    M_N = 3
    N = 4  # one number for each column


class Elements(IntEnum):
    """`type_from` and `type_to` of Cast."""

    AUTO = 0
    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 3
    BFLOAT16 = 4


class Region(IntEnum):
    """`region_type` of LRN."""

    ACROSS_CHANNELS = 0
    WITHIN_CHANNEL = 1
