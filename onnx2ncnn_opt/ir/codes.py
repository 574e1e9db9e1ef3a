"""The enums of ncnn's parameters, such as `op_type` and `activation_type`; `layers.py` says which parameter has which.

A member is an int, and is written as one.
"""

from enum import IntEnum

Activation = IntEnum("Activation", "NONE RELU LEAKYRELU CLIP SIGMOID MISH HARDSWISH", start=0)
"""`activation_type` of convolutions and InnerProduct: the function that follows the sum."""


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
    def exchanged(self) -> "BinaryOp":
        """The operation that gives the same result with the operands exchanged."""
        return _EXCHANGED.get(self, self)

    @property
    def commutes(self) -> bool:
        """True if the order of the operands does not matter."""
        return self.exchanged is self


_PAIRS = {op: BinaryOp[f"R{op.name}"] for op in BinaryOp if f"R{op.name}" in BinaryOp.__members__}
_EXCHANGED = {**_PAIRS, **{second: first for first, second in _PAIRS.items()}}

Eltwise = IntEnum("Eltwise", "PROD SUM MAX", start=0)
"""`op_type` of Eltwise."""

UnaryOp = IntEnum(
    "UnaryOp",
    "ABS NEG FLOOR CEIL SQUARE SQRT RSQRT EXP LOG SIN COS TAN ASIN ACOS ATAN RECIPROCAL TANH LOG10 ROUND TRUNC "
    "SIGN EXPM1 SINH ASINH COSH ACOSH ATANH LOG1P",
    start=0,
)
"""`op_type` of UnaryOp. ROUND takes halves to the even number."""

Reduction = IntEnum("Reduction", "SUM ASUM SUMSQ MEAN MAX MIN PROD L1 L2 LOGSUM LOGSUMEXP", start=0)
"""`operation` of Reduction."""

Pooling = IntEnum("Pooling", "MAX AVG", start=0)
"""`pooling_type` of Pooling."""


SAME_UPPER, SAME_LOWER = -233, -234  # pads of a convolution that depend on the sizes of its operand


class PadMode(IntEnum):
    """`pad_mode` of Pooling: how ncnn computes the number of windows."""

    FULL = 0  # rounds up
    VALID = 1  # rounds down
    SAME_UPPER = 2
    SAME_LOWER = 3


Padding = IntEnum("Padding", "CONSTANT REPLICATE REFLECT", start=0)
"""`type` of Padding, and `pad_type` of Spectrogram."""

Interp = IntEnum("Interp", "NEAREST BILINEAR BICUBIC")
"""`resize_type` of Interp."""

Sample = IntEnum("Sample", "BILINEAR NEAREST BICUBIC")
"""`sample_type` of GridSample."""

SamplePadding = IntEnum("SamplePadding", "ZEROS BORDER REFLECTION")
"""`padding_mode` of GridSample: the values read outside the image."""

Direction = IntEnum("Direction", "FORWARD REVERSE BIDIRECTIONAL", start=0)
"""`direction` of LSTM, GRU and RNN."""


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


Elements = IntEnum("Elements", "AUTO FLOAT32 FLOAT16 INT8 BFLOAT16", start=0)
"""`type_from` and `type_to` of Cast."""

Region = IntEnum("Region", "ACROSS_CHANNELS WITHIN_CHANNEL", start=0)
"""`region_type` of LRN."""
