"""The table of all ncnn layers (ncnn 1.0.20261020): the facts that reader, writer, checks and documentation share.

Notation: see `parse_params` and `parse_weights`. Weights stand in the order of the .bin file. Counts are in elements.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf, prod, sqrt
from operator import itemgetter
from typing import Any

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.codes import Direction
from onnx2ncnn_opt.ir.spec import LayerSpec, Params, Term, Trait, WeightSpec, choose, parse_params, parse_weights

# Parameters that whole families of layers share.
_WINDOW = "1 kernel_w, 2 dilation_w=1, 3 stride_w=1, 4 pad_left"
_WINDOW_2D = (
    "11 kernel_h=kernel_w, 12 dilation_h=dilation_w, 13 stride_h=stride_w, 14 pad_top=pad_left, "
    "15 pad_right=pad_left, 16 pad_bottom=pad_top"
)
_WINDOW_3D = "21 kernel_d=kernel_w, 22 dilation_d=dilation_w, 23 stride_d=stride_w, 24 pad_front=pad_left"
_WEIGHTS = "5 bias_term, 6 weight_data_size"
_ACTIVATION = "9 activation_type:Activation, 10 activation_params:float[]"
_CONVOLUTION = f"0 num_output, {_WINDOW}, {_WEIGHTS}, {_ACTIVATION}"
_GROUPED = f"0 num_output, {_WINDOW}, {_WEIGHTS}, 7 group=1, {_ACTIVATION}"
_DECONV_1D = "15 pad_right=pad_left, 18 output_pad_right, 20 output_w, 28 dynamic_weight"
_DECONV_2D = (
    "18 output_pad_right, 19 output_pad_bottom=output_pad_right, 20 output_w, 21 output_h=output_w, 28 dynamic_weight"
)
_DECONV_3D = (
    f"{_WINDOW_2D}, 17 pad_behind=pad_front, 18 output_pad_right, 19 output_pad_bottom=output_pad_right, "
    f"20 output_pad_behind=output_pad_right, {_WINDOW_3D}, 25 output_w, 26 output_h=output_w, 27 output_d=output_w"
)
_CONV_1D = "15 pad_right=pad_left, 18 pad_value=0.0, 19 dynamic_weight"
_CONV_2D = f"{_WINDOW_2D}, 18 pad_value=0.0, 19 dynamic_weight"
_CONV_3D = f"{_WINDOW_2D}, 17 pad_behind=pad_front, 18 pad_value=0.0, {_WINDOW_3D}"
_POOLING = (
    "0 pooling_type:Pooling, 1 kernel_w, 2 stride_w=1, 3 pad_left, 4 global_pooling, 5 pad_mode:PadMode, "
    "6 avgpool_count_include_pad, 7 adaptive_pooling, 8 out_w"
)
_POOLING_2D = (
    "11 kernel_h=kernel_w, 12 stride_h=stride_w, 13 pad_top=pad_left, 14 pad_right=pad_left, 15 pad_bottom=pad_top"
)

_SIZE_OF_BLOB = re.compile(r"(?<![^(),\s])(\d)[whdcn](?![^(),\s])")


_COLUMNS: Mapping[str, Callable[[Params], int]] = {
    **{name: itemgetter(name) for name in ("constantK", "embed_dim", "kdim", "vdim")},
    "qdim": lambda p: int(p["weight_data_size"]) // int(p["embed_dim"] or 1),
}


def _row_bytes(columns: Callable[[Params], int], p: Params) -> int:
    """Return the bytes of a row of a block-quantised matrix; each row begins at a byte."""
    return -(-columns(p) * (int(p["quantize_term"]) // 100) // 8)


def _row_blocks(columns: Callable[[Params], int], p: Params) -> int:
    """Return the blocks of a row of a block-quantised matrix; each block has a scale."""
    return -(-columns(p) // choose((32, 64, 128), p["quantize_term"] % 10, "quantize_term"))


def _c_size(p: Params) -> int:
    m, n = p["constantM"], p["constantN"]
    return choose((1, m, m, m * n, n), p["constant_broadcast_type_C"], "constant_broadcast_type_C")


# Words of the notation of weights that are no parameters.
_TERMS: Mapping[str, Term] = {
    **_COLUMNS,
    **{f"{name}_bytes": partial(_row_bytes, columns) for name, columns in _COLUMNS.items()},
    **{f"{name}_blocks": partial(_row_blocks, columns) for name, columns in _COLUMNS.items()},
    "has_input_scales": lambda p: p["quantize_term"] >= 400 and p["quantize_term"] % 100 // 10 == 1,
    "C_size": _c_size,
    "directions": lambda p: 2 if p["direction"] == Direction.BIDIRECTIONAL else 1,
}


def _last_blob(*expressions: str) -> int:
    """Return the highest index of an input in expressions (``1w`` is the width of input 1)."""
    return max((int(n) for text in expressions for n in _SIZE_OF_BLOB.findall(text)), default=0)


def _crop_is_one_blob(p: Params) -> bool:
    if _last_blob(p["starts_expr"], p["ends_expr"], p["axes_expr"]):
        return False
    sized = any(p[name] for name in ("outw", "outh", "outd", "outc", "woffset2", "hoffset2", "doffset2", "coffset2"))
    return sized or bool(p["starts"] and p["ends"]) or bool(p["starts_expr"] and p["ends_expr"])


_CONSTANT_WEIGHTS = "weight_data*=weight_data_size, bias_data=num_output if bias_term"
_DYNAMIC_WEIGHTS = (
    "weight_data*=weight_data_size if dynamic_weight==0, bias_data=num_output if bias_term and dynamic_weight==0"
)
_FOR_CHANNELS = "gamma_data=channels if affine, beta_data=channels if affine"
_FOR_ELEMENTS = "gamma_data=affine_size if affine, beta_data=affine_size if affine"
_IS_INT8 = "quantize_term>0 and quantize_term<400"
# The projections of MultiHeadAttention, with the rows and columns of their matrices.
_PROJECTIONS = (
    ("q", "embed_dim", "qdim"),
    ("k", "embed_dim", "kdim"),
    ("v", "embed_dim", "vdim"),
    ("out", "qdim", "embed_dim"),
)
_ATTENTION_WEIGHTS = ", ".join(
    [
        *(
            f"{name}_weight_data*={rows}*{columns} if quantize_term<400, "
            f"{name}_weight_data_packed_bytes!={rows}*{columns}_bytes if quantize_term>=400, {name}_bias_data={rows}"
            for name, rows, columns in _PROJECTIONS
        ),
        *(f"{name}_weight_data_int8_scales=embed_dim if {_IS_INT8}" for name in "qkv"),
        f"out_weight_data_int8_scale=1 if {_IS_INT8}",
        *(
            f"{name}_quantize_scales={rows}*{columns}_blocks if quantize_term>=400"
            for name, rows, columns in _PROJECTIONS
        ),
        *(f"{name}_input_scales={columns} if has_input_scales" for name, _, columns in _PROJECTIONS),
    ]
)
_BLOB_SCALES = "bottom_blob_int8_scales=1 if int8_scale_term, top_blob_int8_scales=1 if int8_scale_term>100"


def _layer(
    number_and_type: str,
    params: str = "",
    weights: str | tuple[WeightSpec, ...] = (),
    *,
    computed: Mapping[str, Term] | None = None,
    inputs: tuple[int, int | None] = (1, 1),
    outputs: tuple[int, int | None] = (1, 1),
    one_blob_only: Term | None = None,
    **others: Any,
) -> LayerSpec:
    """Return the spec of a layer, such as "2 BatchNorm"; notation: see `parse_params` and `parse_weights`.

    By default, `one_blob_only` is True for layers with exactly one input and one output.
    """
    index, type = number_and_type.split()
    return LayerSpec(
        type,
        int(index),
        parse_params(params, computed),
        parse_weights(weights, _TERMS) if isinstance(weights, str) else weights,
        inputs,
        outputs,
        (inputs, outputs) == ((1, 1), (1, 1)) if one_blob_only is None else one_blob_only,
        **others,
    )


def _elementwise(type: str, params: str = "", **others: Any) -> LayerSpec:
    return _layer(type, params, inplace=True, traits=Trait.ELEMENTWISE, **others)


def _convolution(type: str, params: str, scales: str = "") -> LayerSpec:
    """Return a convolution whose weight may be an input; `scales` follow weight and bias in the file."""
    weights = f"{_DYNAMIC_WEIGHTS}, {scales}"
    return _layer(type, params, weights, inputs=(1, 3), one_blob_only=lambda p: p["dynamic_weight"] == 0)


def _recurrent(type: str, gates: int, biases: int, hidden: str = "num_output") -> LayerSpec:
    """Return a layer with `gates` rows and `biases` for each element of its state; `hidden` is the state's size."""
    projects = hidden != "num_output"  # an LSTM may multiply its state by a projection matrix
    size = "3 hidden_size=num_output, " if projects else ""
    rows = f"directions*{gates}*{hidden}"
    weights = [f"weight_xc_data*=weight_data_size, bias_c_data*=directions*{biases}*{hidden}"]
    weights += [f"weight_hc_data*={rows}*num_output"]
    weights += [f"weight_hr_data*=directions*num_output*{hidden} if num_output!={hidden}"] if projects else []
    weights += [f"weight_{name}_data_int8_scales={rows} if int8_scale_term" for name in ("xc", "hc")]
    return _layer(
        type,
        f"0 num_output, 1 weight_data_size, 2 direction:Direction, {size}8 int8_scale_term",
        ", ".join(weights),
        inputs=(1, 3 if projects else 2),
        outputs=(1, 3 if projects else 2),
    )


_TABLE = (
    _elementwise("0 AbsVal"),
    _layer("1 ArgMax", "0 out_max_val, 1 topk=1"),
    _layer(
        "2 BatchNorm",
        "0 channels, 1 eps=0.0",
        "slope_data=channels, mean_data=channels, var_data=channels, bias_data=channels",
        inplace=True,
    ),
    _layer("3 Bias", "0 bias_data_size", "bias_data=bias_data_size", inplace=True),
    _elementwise("4 BNLL"),
    _layer("5 Concat", "0 axis", inputs=(1, None), traits=Trait.MOVES),
    _convolution(
        "6 Convolution",
        f"0 num_output, {_WINDOW}, {_WEIGHTS}, 8 int8_scale_term, {_ACTIVATION}, {_CONV_2D}",
        f"weight_data_int8_scales=num_output if int8_scale_term, {_BLOB_SCALES}",
    ),
    _layer(
        "7 Crop",
        "0 woffset, 1 hoffset, 2 coffset, 3 outw, 4 outh, 5 outc, 6 woffset2, 7 hoffset2, 8 coffset2, "
        "9 starts:int[], 10 ends:int[], 11 axes:int[], 13 doffset, 14 outd, 15 doffset2, "
        "19 starts_expr:string, 20 ends_expr:string, 21 axes_expr:string",
        inputs=(1, 10),
        traits=Trait.MOVES,
        one_blob_only=_crop_is_one_blob,
    ),
    _convolution("8 Deconvolution", f"{_CONVOLUTION}, {_WINDOW_2D}, {_DECONV_2D}"),
    _elementwise("9 Dropout", "0 scale=1.0", half=("scale",)),
    _layer("10 Eltwise", "0 op_type:Eltwise, 1 coeffs:float[]", inputs=(1, None), half=("coeffs",)),
    _elementwise("11 ELU", "0 alpha=0.1"),
    _layer(
        "12 Embed",
        "0 num_output, 1 input_dim, 2 bias_term, 3 weight_data_size, 18 int8_scale_term",
        f"{_CONSTANT_WEIGHTS}, weight_data_int8_scale=1 if int8_scale_term",
    ),
    _elementwise("13 Exp", "0 base=-1.0, 1 scale=1.0, 2 shift=0.0"),
    _layer("14 Flatten", traits=Trait.VIEW),
    _layer(
        "15 InnerProduct",
        f"0 num_output, 1 bias_term, 2 weight_data_size, 8 int8_scale_term, {_ACTIVATION}",
        f"{_CONSTANT_WEIGHTS}, weight_data_int8_scales=num_output if int8_scale_term, "
        "bottom_blob_int8_scales=1 if int8_scale_term",
    ),
    _layer("16 Input", "0 w, 1 h, 2 c, 11 d", inputs=(0, 0), outputs=(1, None), inplace=True),
    _elementwise("17 Log", "0 base=-1.0, 1 scale=1.0, 2 shift=0.0"),
    _layer("18 LRN", "0 region_type:Region, 1 local_size=5, 2 alpha=1.0, 3 beta=0.75, 4 bias=1.0", inplace=True),
    _layer(
        "19 MemoryData",
        "0 w, 1 h, 2 c, 11 d, 21 load_type=1",
        (
            WeightSpec(
                "data",
                lambda p: prod(max(p[axis], 1) for axis in "whdc"),
                tagged=lambda p: p["load_type"] == 0,
                when=itemgetter("w"),
            ),
        ),
        inputs=(0, 0),
        outputs=(1, None),
    ),
    _layer("20 MVN", "0 normalize_variance, 1 across_channels, 2 eps=0.0001"),
    _layer("21 Pooling", f"{_POOLING}, {_POOLING_2D}, 18 out_h=out_w"),
    _elementwise("22 Power", "0 power=1.0, 1 scale=1.0, 2 shift=0.0"),
    _layer("23 PReLU", "0 num_slope", "slope_data=num_slope", inplace=True),
    _layer(
        "24 Proposal",
        "0 feat_stride=16, 1 base_size=16, 2 pre_nms_topN=6000, 3 after_nms_topN=300, 4 nms_thresh=0.7, 5 min_size=16",
        inputs=(3, 3),
        outputs=(1, 2),
    ),
    _layer(
        "25 Reduction",
        "0 operation:Reduction, 1 reduce_all=1, 2 coeff=1.0, 3 axes:int[], 4 keepdims, 5 fixbug0",
        half=("coeff",),
    ),
    _elementwise("26 ReLU", "0 slope=0.0"),
    _layer(
        "27 Reshape",
        "0 w=-233, 1 h=-233, 2 c=-233, 6 shape_expr:string, 11 d=-233, 12 input_batch_axis=233, "
        "13 output_batch_axis=233",
        inputs=(1, 10),
        traits=Trait.VIEW,
        one_blob_only=lambda p: _last_blob(p["shape_expr"]) == 0,
    ),
    _layer("28 ROIPooling", "0 pooled_width, 1 pooled_height, 2 spatial_scale=1.0", inputs=(2, 2)),
    _layer(
        "29 Scale",
        "0 scale_data_size, 1 bias_term",
        "scale_data=scale_data_size if scale_data_size!=-233, "
        "bias_data=scale_data_size if bias_term and scale_data_size!=-233",
        inputs=(1, 2),
        inplace=True,
        half=("scale_data", "bias_data"),
        one_blob_only=lambda p: p["scale_data_size"] != -233,
    ),
    _elementwise("30 Sigmoid", bounds=(0, 1)),
    _layer("31 Slice", "0 slices:int[], 1 axis, 2 indices:int[]", outputs=(1, None), traits=Trait.MOVES),
    _layer("32 Softmax", "0 axis, 1 fixbug0", inplace=True, bounds=(0, 1)),
    _layer("33 Split", outputs=(1, None), traits=Trait.SHARES),
    _layer("34 SPP", "0 pooling_type, 1 pyramid_height=1"),
    _elementwise("35 TanH", bounds=(-1, 1)),
    _elementwise("36 Threshold", "0 threshold=0.0", bounds=(0, 1)),
    _layer("37 Tile", "0 axis, 1 tiles=1, 2 repeats:int[]", traits=Trait.MOVES),
    _recurrent("38 RNN", 1, 1),
    _recurrent("39 LSTM", 4, 4, "hidden_size"),
    _layer(
        "40 BinaryOp",
        "0 op_type:BinaryOp, 1 with_scalar, 2 b=0.0",
        inputs=(1, 2),
        half=("b",),
        one_blob_only=lambda p: p["with_scalar"] != 0,
    ),
    _layer("41 UnaryOp", "0 op_type:UnaryOp", inplace=True, traits=Trait.ELEMENTWISE),
    _convolution(
        "42 ConvolutionDepthWise",
        f"0 num_output, {_WINDOW}, {_WEIGHTS}, 7 group=1, 8 int8_scale_term, {_ACTIVATION}, {_CONV_2D}",
        f"weight_data_int8_scales=group if int8_scale_term==1|101, "
        f"weight_data_int8_scales=1 if int8_scale_term==2|102, {_BLOB_SCALES}",
    ),
    _layer(
        "43 Padding",
        "0 top, 1 bottom, 2 left, 3 right, 4 type:Padding, 5 value=0.0, 6 per_channel_pad_data_size, 7 front, 8 behind",
        "per_channel_pad_data=per_channel_pad_data_size if per_channel_pad_data_size",
    ),
    _layer("44 Squeeze", "0 squeeze_w, 1 squeeze_h, 2 squeeze_c, 3 axes:int[], 11 squeeze_d", traits=Trait.VIEW),
    _layer("45 ExpandDims", "3 axes:int[]", traits=Trait.VIEW),
    _layer(
        "46 Normalize",
        "0 across_spatial, 1 channel_shared, 2 eps=0.0001, 3 scale_data_size, 4 across_channel=1, 9 eps_mode:EpsMode",
        "scale_data=scale_data_size",
        inplace=True,
        half=("eps", "scale_data"),
    ),
    _layer("47 Permute", "0 order_type", traits=Trait.VIEW),
    _layer(
        "48 PriorBox",
        "0 min_sizes:float[], 1 max_sizes:float[], 2 aspect_ratios:float[], 3 variances0=0.1, "
        "4 variances1=0.1, 5 variances2=0.2, 6 variances3=0.2, 7 flip=1, 8 clip, 9 image_width, "
        "10 image_height, 11 step_width=-233.0, 12 step_height=-233.0, 13 offset=0.0, "
        "14 step_mmdetection, 15 center_mmdetection",
        inputs=(1, 2),
    ),
    _layer(
        "49 DetectionOutput",
        "0 num_class, 1 nms_threshold=0.05, 2 nms_top_k=300, 3 keep_top_k=100, "
        "4 confidence_threshold=0.5, 5 variances0=0.1, 6 variances1=0.1, 7 variances2=0.2, "
        "8 variances3=0.2",
        inputs=(3, 3),
    ),
    _layer(
        "50 Interp",
        "0 resize_type:Interp, 1 height_scale=1.0, 2 width_scale=1.0, 3 output_height, 4 output_width, "
        "5 dynamic_target_size, 6 align_corner, 9 size_expr:string",
        inputs=(1, 10),
        one_blob_only=lambda p: p["dynamic_target_size"] != 1 and _last_blob(p["size_expr"]) == 0,
    ),
    _convolution("51 DeconvolutionDepthWise", f"{_GROUPED}, {_WINDOW_2D}, {_DECONV_2D}"),
    _layer("52 ShuffleChannel", "0 group=1, 1 reverse", traits=Trait.MOVES),
    _layer("53 InstanceNorm", "0 channels, 1 eps=0.001, 2 affine=1", _FOR_CHANNELS, inplace=True),
    _elementwise("54 Clip", "0 min=-3.402823466e+38, 1 max=3.402823466e+38"),
    _layer("55 Reorg", "0 stride=1, 1 mode", traits=Trait.MOVES),
    _layer(
        "56 YoloDetectionOutput",
        "0 num_class=20, 1 num_box=5, 2 confidence_threshold=0.01, 3 nms_threshold=0.45, 4 biases:float[]",
        inputs=(1, None),
        inplace=True,
    ),
    _layer("57 Quantize", "0 scale_data_size=1", "scale_data=scale_data_size"),
    _layer(
        "58 Dequantize",
        "0 scale_data_size=1, 1 bias_data_size",
        "scale_data=scale_data_size, bias_data=bias_data_size if bias_data_size",
    ),
    _layer(
        "59 Yolov3DetectionOutput",
        "0 num_class=20, 1 num_box=5, 2 confidence_threshold=0.01, 3 nms_threshold=0.45, "
        "4 biases:float[], 5 mask:int[], 6 anchors_scale:float[]",
        inputs=(1, None),
    ),
    _layer(
        "60 PSROIPooling", "0 pooled_width=7, 1 pooled_height=7, 2 spatial_scale=0.0625, 3 output_dim", inputs=(2, 2)
    ),
    _layer(
        "61 ROIAlign",
        "0 pooled_width, 1 pooled_height, 2 spatial_scale=1.0, 3 sampling_ratio, 4 aligned, 5 version",
        inputs=(2, 2),
    ),
    _layer("62 Packing", "0 out_elempack=1, 1 use_padding, 2 cast_type_from, 3 cast_type_to"),
    _layer(
        "63 Requantize",
        "0 scale_in_data_size=1, 1 scale_out_data_size=1, 2 bias_data_size, 3 activation_type:Activation, "
        "4 activation_params:float[]",
        "scale_in_data=scale_in_data_size, scale_out_data=scale_out_data_size, "
        "bias_data=bias_data_size if bias_data_size",
    ),
    _layer("64 Cast", "0 type_from:Elements, 1 type_to:Elements"),
    _elementwise("65 HardSigmoid", "0 alpha=0.2, 1 beta=0.5", bounds=(0, 1), half=("alpha", "beta")),
    _elementwise("66 SELU", "0 alpha=1.67326324, 1 lambda=1.050700987"),
    _elementwise("67 HardSwish", "0 alpha=0.2, 1 beta=0.5", half=("alpha", "beta")),
    _layer("68 Noop", inputs=(1, None), outputs=(1, None), inplace=True, traits=Trait.SHARES),
    _layer("69 PixelShuffle", "0 upscale_factor=1, 1 mode", traits=Trait.MOVES),
    _layer("70 DeepCopy", traits=Trait.MOVES | Trait.ELEMENTWISE),
    _elementwise("71 Mish"),
    _layer("72 StatisticsPooling", "0 include_stddev"),
    _elementwise("73 Swish"),
    _layer(
        "74 Gemm",
        "0 alpha=1.0, 1 beta=1.0, 2 transA, 3 transB, 4 constantA, 5 constantB, 6 constantC, 7 constantM, "
        "8 constantN, 9 constantK, 10 constant_broadcast_type_C:GemmC, 11 output_N1M, 12 output_elempack, "
        "13 output_elemtype, 14 output_transpose, 18 quantize_term, 20 constant_TILE_M, "
        "21 constant_TILE_N, 22 constant_TILE_K",
        "A_data*=constantM*constantK if constantA, B_data*=constantK*constantN if constantB and quantize_term<400, "
        "B_data_packed_bytes!=constantN*constantK_bytes if constantB and quantize_term>=400, "
        "C_data*=C_size if constantC and constant_broadcast_type_C!=-1, "
        "B_data_quantize_scales=constantN*constantK_blocks if quantize_term>=400, "
        "B_data_input_scales=constantK if has_input_scales, "
        f"A_data_int8_scales=constantM if {_IS_INT8} and constantA, B_data_int8_scale=1 if {_IS_INT8} and constantB",
        inputs=(1, 3),
        half=("alpha", "beta"),
        one_blob_only=lambda p: [p["constantA"], p["constantB"], p["constantC"]].count(1) == 2,
    ),
    _layer("75 GroupNorm", "0 group=1, 1 channels, 2 eps=0.001, 3 affine=1", _FOR_CHANNELS, inplace=True),
    _layer("76 LayerNorm", "0 affine_size, 1 eps=0.001, 2 affine=1", _FOR_ELEMENTS, inplace=True),
    _elementwise("77 Softplus", bounds=(0, inf)),
    _recurrent("78 GRU", 3, 4),
    _layer(
        "79 MultiHeadAttention",
        "0 embed_dim, 1 num_heads=1, 2 weight_data_size, 3 kdim=embed_dim, 4 vdim=embed_dim, 5 attn_mask, "
        "6 scale=0.0, 7 kv_cache, 18 quantize_term",
        _ATTENTION_WEIGHTS,
        computed={"scale": lambda p: 1 / sqrt(max(p["embed_dim"] // max(p["num_heads"], 1), 1))},
        inputs=(1, 6),
        outputs=(1, 3),
    ),
    _elementwise("80 GELU", "0 fast_gelu"),
    _convolution("81 Convolution1D", f"{_CONVOLUTION}, {_CONV_1D}"),
    _layer("82 Pooling1D", f"{_POOLING}, 14 pad_right=pad_left"),
    _convolution("83 ConvolutionDepthWise1D", f"{_GROUPED}, {_CONV_1D}"),
    _layer("84 Convolution3D", f"{_CONVOLUTION}, {_CONV_3D}", _CONSTANT_WEIGHTS),
    _layer("85 ConvolutionDepthWise3D", f"{_GROUPED}, {_CONV_3D}", _CONSTANT_WEIGHTS),
    _layer(
        "86 Pooling3D",
        f"{_POOLING}, {_POOLING_2D}, 16 pad_behind=pad_front, 18 out_h=out_w, 21 kernel_d=kernel_w, "
        "22 stride_d=stride_w, 23 pad_front=pad_left, 28 out_d=out_w",
    ),
    _layer("87 MatMul", "0 transB", inputs=(2, 2)),
    _convolution("88 Deconvolution1D", f"{_CONVOLUTION}, {_DECONV_1D}"),
    _convolution("89 DeconvolutionDepthWise1D", f"{_GROUPED}, {_DECONV_1D}"),
    _layer("90 Deconvolution3D", f"{_CONVOLUTION}, {_DECONV_3D}", _CONSTANT_WEIGHTS),
    _layer("91 DeconvolutionDepthWise3D", f"{_GROUPED}, {_DECONV_3D}", _CONSTANT_WEIGHTS),
    _layer("92 Einsum", "0 equation:int[]", inputs=(1, None)),
    _layer("93 DeformableConv2D", f"{_CONVOLUTION}, {_WINDOW_2D}", _CONSTANT_WEIGHTS, inputs=(2, 3)),
    _layer("94 GLU", "0 axis"),
    _layer("95 Fold", f"{_WINDOW}, {_WINDOW_2D}, 20 output_w, 21 output_h=output_w"),
    _layer("96 Unfold", f"{_WINDOW}, {_WINDOW_2D}, 18 pad_value=0.0"),
    _layer(
        "97 GridSample",
        "0 sample_type:Sample=1, 1 padding_mode:SamplePadding=1, 2 align_corner, 3 permute_fusion",
        inputs=(2, 2),
    ),
    _layer("98 CumulativeSum", "0 axis", inplace=True),
    _layer(
        "99 CopyTo",
        "0 woffset, 1 hoffset, 2 coffset, 9 starts:int[], 11 axes:int[], 13 doffset",
        inputs=(2, 2),
        traits=Trait.MOVES,
    ),
    _elementwise("100 Erf", bounds=(-1, 1)),
    _layer("101 Diag", "0 diagonal"),
    _elementwise("102 CELU", "0 alpha=1.0"),
    _elementwise("103 Shrink", "0 bias=0.0, 1 lambd=0.5"),
    _layer("104 RMSNorm", "0 affine_size, 1 eps=0.001, 2 affine=1", "gamma_data=affine_size if affine", inplace=True),
    _layer(
        "105 Spectrogram",
        "0 n_fft, 1 power, 2 hoplen, 3 winlen=n_fft, 4 window_type, 5 center=1, 6 pad_type:Padding=2, "
        "7 normalized, 8 onesided=1",
        computed={"hoplen": lambda p: p["n_fft"] // 4},
    ),
    _layer(
        "106 InverseSpectrogram",
        "0 n_fft, 1 returns, 2 hoplen, 3 winlen=n_fft, 4 window_type, 5 center=1, 7 normalized",
        computed={"hoplen": lambda p: p["n_fft"] // 4},
    ),
    _layer("107 Flip", "0 axes:int[]", traits=Trait.MOVES),
    _layer("108 SDPA", "5 attn_mask, 6 scale=0.0, 7 kv_cache, 18 int8_scale_term", inputs=(3, 6), outputs=(1, 3)),
    _layer("109 RotaryEmbed", "0 interleaved", inputs=(3, 3)),
)

LAYERS: Mapping[str, LayerSpec] = {spec.type: spec for spec in _TABLE}
BY_INDEX: Mapping[int, LayerSpec] = {spec.index: spec for spec in _TABLE}


def types_with(trait: Trait) -> frozenset[str]:
    """Return the types of ncnn that have a trait."""
    return frozenset(spec.type for spec in _TABLE if trait in spec.traits)


def with_custom(specs: Iterable[LayerSpec]) -> Mapping[str, LayerSpec]:
    """Return the table with custom layer types added; of several with one name, the last is taken.

    Raises GraphError for a type that ncnn has itself.
    """
    custom = {spec.type: spec for spec in specs}
    for spec in custom.values():
        if not spec.is_custom or spec.type in LAYERS:
            raise GraphError(
                f"{spec.type} cannot be declared as a custom layer: ncnn has a layer of that type or number"
            )
        if Trait.ELEMENTWISE in spec.traits and (spec.inputs, spec.outputs) != ((1, 1), (1, 1)):
            raise GraphError(f"{spec.type} cannot be declared as elementwise: that takes one input and one output")
    return {**LAYERS, **custom}
