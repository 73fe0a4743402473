"""What class of function each operator is, by its name: the one table from which all parts take their sets of operators.

An operator with a lemma stands in exactly one class, or its row is refused. `graphguard/audit/classes.py` executes what is said
here. Operators that have no lemma may be listed, too.
"""

from __future__ import annotations

from functools import cache


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---------------------------------------------------------------------- classes
# Every element of the operand, in another shape, memory or dtype.
RESHAPES = _names("""_reshape_alias _to_copy _unsafe_view alias clone contiguous detach expand flatten lift_fresh
lift_fresh_copy movedim numpy_T permute reshape squeeze t to transpose unflatten unsqueeze view view_as_complex
view_as_real""")
# Every element of the operand, in another order, or several times.
REORDERS = _names("flip pixel_shuffle pixel_unshuffle repeat roll rot90 tile")
# Some elements of the first operand.
TAKES = _names("""_unsafe_index as_strided chunk diagonal embedding gather index index_select select slice split
split_with_sizes split_with_sizes_copy take unbind unfold unsafe_chunk unsafe_split unsafe_split_with_sizes""")
# Elements of operands beside each other, or between fixed numbers.
JOINS = _names("""cat constant_pad_nd copy diag_embed diagonal_backward fill select_backward slice_backward stack tril triu
where""")
# The first operand, with elements of another one, or numbers, at some positions. `index_put` may add them.
WRITES = _names("""_index_put_impl _unsafe_index_put as_strided_scatter diagonal_scatter index_copy index_fill index_put
masked_fill masked_scatter scatter select_scatter slice_scatter""")
MOVES = RESHAPES | REORDERS | TAKES | JOINS | WRITES
ADDS_AT = _names("index_add scatter_add scatter_reduce")  # to the first operand, at some positions

COMPARES = _names("eq ge gt le lt ne")
# Elementwise: no operand is ever ignored, so where one is undefined, the result is.
_OF_ALL = _names("""abs acos add addcdiv addcmul asin asinh atan atanh ceil clamp clamp_max clamp_min cos cosh div elu erf erfc
exp exp2 expm1 floor gelu gelu_backward hardtanh leaky_relu lerp log log10 log1p log2 log_sigmoid_forward logaddexp maximum
minimum mish mul neg reciprocal relu round rsqrt rsub sigmoid sigmoid_backward silu silu_backward sin sinh softplus sqrt square
sub tan tanh tanh_backward trunc""")
# Elementwise: an operand may be ignored, or is not known not to be.
_OF_SOME = _names("""_conj _conj_physical _neg_view _prelu_kernel _prelu_kernel_backward acosh bitwise_and bitwise_not
bitwise_or bitwise_xor celu complex elu_backward floor_divide fmax fmin fmod frac hardshrink hardshrink_backward hardsigmoid
hardsigmoid_backward hardswish hardswish_backward hardtanh_backward heaviside hypot isinf isnan leaky_relu_backward lgamma
log_sigmoid_backward logical_and logical_not logical_or logical_xor nan_to_num native_dropout_backward polar pow remainder sgn
sign sinc softplus_backward softshrink softshrink_backward threshold threshold_backward xlogy""")
ELEMENTWISE = COMPARES | _OF_ALL | _OF_SOME

# All others: a number of the result depends on many of the operands, or on their order.
COMBINES = _names("""_fused_adagrad _fused_adam _fused_adamw _fused_sgd _log_softmax _log_softmax_backward_data
_native_batch_norm_legit _native_batch_norm_legit_no_training _safe_softmax _softmax _softmax_backward_data all amax amin
aminmax any argmax argmin binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits bucketize
count_nonzero cummax cummin cumprod cumsum embedding_dense_backward glu glu_backward huber_loss huber_loss_backward isin
kthvalue linalg_solve_triangular linalg_vector_norm logcumsumexp logsumexp max mean median min mode mse_loss mse_loss_backward
nanmedian native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm prod renorm
repeat_interleave searchsorted smooth_l1_loss smooth_l1_loss_backward sort std std_mean sum topk trace var var_mean""")
PRODUCTS = _names("""_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward addbmm
addmm addmv addr baddbmm bmm convolution convolution_backward dot linear matmul mm mv outer vdot""")
CREATES = _names("""_efficientzerotensor arange empty empty_like empty_permuted empty_strided eye full full_like linspace
new_empty new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor zero zeros zeros_like""")
DRAWS = _names("""_sample_dirichlet _standard_gamma bernoulli binomial cauchy exponential geometric log_normal multinomial
native_dropout normal normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm
rrelu_with_noise uniform""")

CLASSES = {
    "reshapes": RESHAPES, "reorders": REORDERS, "takes": TAKES, "joins": JOINS, "writes": WRITES, "adds at": ADDS_AT,
    "elementwise": ELEMENTWISE, "products": PRODUCTS, "combines": COMBINES, "creates": CREATES, "draws": DRAWS,
}  # fmt: skip
CLASS = {name: each for each, names in CLASSES.items() for name in names}

# ---------------------------------------------------------------------- what else is known of them
# Where an element of an operand is nan, one of the first result is.
SHOWS = RESHAPES | REORDERS | _OF_ALL
SHOWS |= _names("""_adaptive_avg_pool2d _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data addmm addmv
addr amax amin baddbmm bmm cat cumsum dot linear logsumexp matmul mean mm mse_loss mse_loss_backward mv native_group_norm
native_layer_norm outer prod stack std sum var var_mean""")
# Where an element of an operand is infinite, too, one of the first result is infinite or nan.
KEEPS = SHOWS - _names("""_log_softmax_backward_data _softmax addcdiv amax amin atan clamp clamp_max clamp_min div elu erf erfc
exp exp2 expm1 gelu gelu_backward hardtanh log_sigmoid_forward logaddexp logsumexp maximum minimum mish reciprocal relu rsqrt
sigmoid silu silu_backward softplus tanh""")
# The same of the first operand alone.
KEEPS_FIRST = _names("_log_softmax_backward_data addcdiv div gelu_backward silu_backward")
# Nothing is rounded: each number of a result is one of an operand, up to its sign, or a whole one.
EXACT = (MOVES | CREATES) - _names("_index_put_impl _unsafe_index_put index_put linspace")
EXACT |= _names("""abs amax amin aminmax ceil clamp clamp_max clamp_min cummax cummin floor fmax fmin hardtanh
hardtanh_backward kthvalue max max_pool2d_with_indices max_pool2d_with_indices_backward maximum median min minimum mode
nan_to_num nanmedian neg relu round sgn sign sort threshold_backward topk trunc""")
# A result may lie beyond all numbers that the operands' dtype has, though it is a number.
GROWS = ADDS_AT | PRODUCTS - {"_scaled_dot_product_flash_attention_for_cpu"}
GROWS |= _names("""add addcmul cosh cumprod cumsum exp exp2 expm1 linalg_vector_norm mean mul pow prod rsub sinh square sub sum
trace""")

# Linear in the gradient that they are given first.
_GRADIENTS = _names("""_log_softmax_backward_data _softmax_backward_data diagonal_backward elu_backward
embedding_dense_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
leaky_relu_backward log_sigmoid_backward mse_loss_backward native_dropout_backward nll_loss2d_backward nll_loss_backward
select_backward sigmoid_backward silu_backward slice_backward softplus_backward softshrink_backward tanh_backward
threshold_backward""")
# In which operands together an operator keeps sums, all others fixed: `0 1` says in the first, and in the second; `01` in both
# at once, as a sum does; `*` in all at once. Tensors are counted, not arguments.
_LINEAR = {
    "0": RESHAPES | REORDERS | TAKES | _GRADIENTS | _names("_conj cumsum diag_embed div mean neg sum trace tril triu"),
    "1": _names("copy"),
    "0 1": _names("bmm dot linear matmul mm mul mv outer vdot"),
    "01": _names("add as_strided_scatter diagonal_scatter lerp rsub select_scatter slice_scatter sub"),
    "02": _names("index_add index_copy scatter_add"),
    "12": _names("where"),
    "01 02": _names("addbmm addmm addmv addr baddbmm"),
    "02 12": _names("convolution"),
    "*": _names("cat stack"),
}  # fmt: skip

# The arguments in which ranks that are described at once may have different whole numbers.
VARYING = {
    "slice": (2, 3), "select": (2,), "slice_backward": (3, 4), "select_backward": (3,), "slice_scatter": (3, 4),
    "select_scatter": (3,), "arange": (0, 1), "full": (1,), "fill": (1,), "scalar_tensor": (0,),
    **dict.fromkeys(COMPARES | {"add", "sub", "rsub", "mul"}, (1,)),
}  # fmt: skip


# ---------------------------------------------------------------------- questions
@cache
def name_of(operator: str) -> str:
    """`add` for `aten.add_.Tensor`. Of what is not ATen's nothing is known by name: it keeps its own."""
    if not operator.startswith("aten."):
        return operator
    name = operator.split(".")[1]
    return name if name.endswith("__") else name.removesuffix("_")


def class_of(operator: str) -> str | None:
    return CLASS.get(name_of(operator))


@cache
def linear_in(operator: str, operands: int) -> tuple[frozenset[int], ...]:
    """The sets of operands in which an operator of so many is linear, all others fixed."""
    if operator.endswith("_mode"):  # a quotient that is rounded
        return ()
    groups = next((groups for groups, names in _LINEAR.items() if name_of(operator) in names), "")
    found = (range(operands) if group == "*" else map(int, group) for group in groups.split())
    return tuple(frozenset(each for each in group if each < operands) for group in found)
