"""Names of `triton.language` that a kernel may use."""

from __future__ import annotations

MATH = frozenset(
    """
    abs ceil cos div_rn erf exp exp2 fdiv floor fma log log2 rsqrt sin sqrt sqrt_rn umulhi
    """.split()  # noqa: SIM905
)
TYPES = frozenset(
    """
    bfloat16 float16 float32 float64 float8e4nv float8e5 int1 int16 int32 int64 int8 uint16
    uint32 uint64 uint8
    """.split()  # noqa: SIM905
)
FUNCTIONS = frozenset(
    """
    add arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas
    atomic_max atomic_min atomic_or atomic_xchg atomic_xor broadcast broadcast_to cast cat
    cdiv clamp constexpr cumprod cumsum debug_barrier device_assert dot expand_dims flip
    full gather histogram interleave join load max max_constancy max_contiguous maximum min
    minimum mul multiple_of num_programs permute pointer_type program_id rand rand4x randint
    randint4x randn randn4x range ravel reduce reduce_or reshape sigmoid softmax sort split
    squeeze static_assert static_range store sub sum swizzle2d topk trans unsqueeze view
    where xor_sum zeros zeros_like
    """.split()  # noqa: SIM905
)
LANGUAGE = MATH | TYPES | FUNCTIONS
METHODS = frozenset(
    """
    abs argmax argmin associative_scan atomic_add atomic_and atomic_cas atomic_max
    atomic_min atomic_or atomic_xchg atomic_xor broadcast_to cast cdiv ceil cos cumprod
    cumsum erf exp exp2 expand_dims flip floor gather histogram log log2 logical_and
    logical_or max min permute ravel reduce reduce_or reshape rsqrt sigmoid sin softmax sort
    split sqrt sqrt_rn store sum to trans view xor_sum
    """.split()  # noqa: SIM905
)
ATTRIBUTES = frozenset(
    """
    T dtype element_ty numel shape type value
    """.split()  # noqa: SIM905
)
"""Attributes of tensors, types and constants."""
BUILTINS = frozenset(
    """
    abs bool float int len max min range
    """.split()  # noqa: SIM905
)
UNSUPPORTED = {
    "inline_asm_elementwise": "inline PTX",
    "extra": "a library of the device",
    "device_print": "printing",
    "static_print": "printing",
    "make_tensor_descriptor": "a tensor descriptor",
    "load_tensor_descriptor": "a tensor descriptor",
    "store_tensor_descriptor": "a tensor descriptor",
    "make_block_ptr": "a block pointer",
    "advance": "a block pointer",
    "dot_scaled": "a product of scaled blocks",
    "map_elementwise": "a function of elements",
    "atomic_poll": "waiting for other programs",
    "atomic_load": "an ordered load",
    "atomic_store": "an ordered store",
}
"""Names that Triton has, and the interpreter or our rules do not."""
