"""A module that replaces deep_gemm for the scores of the lightning indexer, in 8 bits.

Names, arguments and results are those of DeepGEMM 2.8, and of the build that SGLang uses, as on
Hopper: queries have no scales of their own, and results are float32. Every other name, the matrix
products among them, is DeepGEMM's own where that is installed, and otherwise raises an
AttributeError. It needs torch.
"""

import operator
from typing import Any, NoReturn, Optional, Tuple

import torch

from winnow import indexer
from winnow.compat._original import original, passed_on
from winnow.compat._refusal import REFUSALS, error_of, flag, refuse, renamed, shape_of
from winnow.errors import Error

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "set_num_sms",
]

__version__ = "2.8.1"
"""The version of deep_gemm whose functions these are."""

Tensor = torch.Tensor
_F8 = torch.float8_e4m3fn
_BYTES = {torch.int8, _F8}  # which may be viewed as uint8
_ALIGNMENT = 64  # columns between the rows of a result, for kernels that read it in vectors

# The arguments of winnow.indexer whose names here are others.
_NAMES = {
    "k": "kv",
    "k_scale": "kv",
    "key_start": "cu_seq_len_k_start",
    "key_end": "cu_seq_len_k_end",
    "width": "max_seqlen_k",
}
_NAMES_OF_PAGED = {
    "pages": "kv_cache",
    "block_tables": "block_table",
    "max_context": "max_context_len",
}


class NotStoodIn(Error, AttributeError):
    """A name of deep_gemm that is not here: an AttributeError, so that hasattr() finds nothing, and
    neither does getattr() with a default."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (found := original("deep_gemm")) is not None:
        return getattr(found, name)
    text = (
        "winnow.compat.deep_gemm does not stand in for it, only for the indexer's scores; "
        "install DeepGEMM, to which it is passed on (https://github.com/deepseek-ai/DeepGEMM; "
        "SGLang's build: pip install sgl-deep-gemm), or let the engine take its other kernels "
        "(vLLM: VLLM_USE_DEEP_GEMM=0, SGLang: SGLANG_ENABLE_JIT_DEEPGEMM=0)"
    )
    raise error_of(NotStoodIn, f"deep_gemm.{name}", text, code="unsupported")


_num_sms: Optional[int] = None
_MOST_SMS = 2**16


def _sms(name: str, argument: str, value: Any) -> int:
    try:
        sms = 0 if isinstance(value, bool) else operator.index(value)
    except (RuntimeError, TypeError, ValueError):
        sms = 0
    if not 1 <= sms <= _MOST_SMS:
        refuse(name, argument, f"1 to {_MOST_SMS} multiprocessors", value)
    return sms


@passed_on("deep_gemm", works_here=True)
def get_num_sms() -> int:
    """Multiprocessors of the GPU, or what set_num_sms() was given; 1 without a GPU. Where DeepGEMM
    is installed, this is DeepGEMM's number, which its matrix products use."""
    if _num_sms is not None:
        return _num_sms
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@passed_on("deep_gemm", works_here=True)
def set_num_sms(new_num_sms: int) -> None:
    """What get_num_sms() returns from now on. No kernel of Winnow reads it."""
    global _num_sms
    _num_sms = _sms("set_num_sms", "new_num_sms", new_num_sms)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: None = None
) -> Tensor:
    """A stand-in for DeepGEMM's plan of a paged call: zeros [num_sms + 1, 2], int32, that nothing
    here reads. Lengths may change between calls."""
    name = "get_paged_mqa_logits_metadata"
    _check_tensor(name, "context_lens", context_lens)
    if indices is not None:
        refuse(name, "indices", "None", type(indices).__name__)
    sms = _sms(name, "num_sms", num_sms)
    return torch.zeros((sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def _check_tensor(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        refuse(name, argument, "a tensor of torch", type(value).__name__)


def _values(name: str, q: Any) -> Any:
    """The queries, alone or in DeepGEMM's pair (values, scales or None)."""
    if isinstance(q, (tuple, list)):
        if len(q) != 2 or q[1] is not None:
            got = f"{len(q)} of them" if len(q) != 2 else "scales"
            refuse(name, "q", "values, or a pair of values and None: fold scales into weights", got)
        q = q[0]
    if getattr(q, "dtype", None) is not _F8:
        shape_of(name, "q", q)
        refuse(name, "q", f"dtype {_F8}", getattr(q, "dtype", type(q).__name__))
    return q


def _check_dtype(name: str, logits_dtype: Optional[torch.dtype]) -> None:
    if logits_dtype is not None and logits_dtype is not torch.float32:
        refuse(name, "logits_dtype", "torch.float32", logits_dtype)


def _first(name: str, argument: str, tensor: Any) -> int:
    """The size of the first dimension."""
    shape = shape_of(name, argument, tensor)
    if not shape:
        refuse(name, argument, "a tensor with rows", "one number")
    return shape[0]


def _is_flag(value: Any) -> bool:
    """A bool, also one of numpy or in a tensor, which Python takes for a number."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _columns(name: str, argument: str, value: Any) -> int:
    if type(value) is int and 0 <= value < 2**31:
        return value
    try:
        columns = -1 if _is_flag(value) else operator.index(value)
    except (RuntimeError, TypeError, ValueError):
        columns = -1
    if not 0 <= columns < 2**31:
        refuse(name, argument, "0 or a number of columns", value)
    return columns


def _aligned(columns: int) -> int:
    return -(-columns // _ALIGNMENT) * _ALIGNMENT


def _rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """A new result [rows, columns] whose rows begin at aligned addresses."""
    stride = _aligned(columns)
    result = torch.empty(rows, stride, dtype=torch.float32, device=like.device)
    return result if stride == columns else result.as_strided((rows, columns), (stride, 1))


def _mqa_logits(
    name: str, q: Any, kv: Any, weights: Tensor, start: Tensor, end: Tensor, width: Optional[int],
    clean: bool = True,
) -> Tensor:  # fmt: skip
    """Scores of all keys, or with a width those from `start` on of each query."""
    q = _values(name, q)
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        refuse(name, "kv", "a pair (keys, scales)", type(kv).__name__)
    keys, scales = kv
    queries, s_k = _first(name, "q", q), _first(name, "kv", keys)
    if start is None or end is None:
        argument = "cu_seq_len_k_start" if start is None else "cu_seq_len_k_end"
        refuse(name, argument, "a tensor of torch", "NoneType")
    out = _rows(queries, s_k if width is None else width, q)
    try:
        return indexer.scores(
            q, keys, weights, k_scale=scales, key_start=start, key_end=end, clean=clean,
            width=width, out=out,
        )  # fmt: skip
    except REFUSALS as error:
        raise renamed(name, _NAMES, error) from None


def fp8_mqa_logits(
    q: Any,
    kv: Tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """The indexer's scores of keys in 8 bits, as DeepGEMM's function of this name before 2.8.

        logits[i,t] = scale[t] * sum over h of weights[i,h] * max(0, dot(q[i,h,:], k[t,:]))

    Args:
        q: [s_q, h, d], float8_e4m3fn, or a pair of that and None; h 1 to 128, d 128 or 64.
        kv: (k [s_k, d], float8_e4m3fn; scale [s_k], float32).
        weights: [s_q, h], float32 or bfloat16.
        cu_seq_len_k_start, cu_seq_len_k_end: [s_q], int32: the keys that each query sees.
        clean_logits: whether the columns of other keys are -inf; they are undefined otherwise.
        max_seqlen_k: if not 0, the result has this many columns, and row i begins with key
            cu_seq_len_k_start[i].
        logits_dtype: torch.float32.

    Returns:
        logits, float32: [s_q, s_k], or [s_q, max_seqlen_k].

    Raises:
        ValueError: q has scales of its own, another logits_dtype, or as winnow.indexer.scores().
    """
    name = "fp8_mqa_logits"
    _check_dtype(name, logits_dtype)
    clean = flag(name, "clean_logits", clean_logits)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    width = _columns(name, "max_seqlen_k", max_seqlen_k) or None
    return _mqa_logits(name, q, kv, weights, *bounds, width, clean)


def fp8_fp4_mqa_logits(
    q: Any,
    kv: Tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: Any = True,
    max_seqlen_k: Any = None,
    logits_dtype: Optional[torch.dtype] = None,
    *,
    schedule_meta: Optional[Tensor] = None,
) -> Tensor:
    """fp8_mqa_logits() under DeepGEMM's newer name, for data in 8 bits.

    DeepGEMM 2.8 takes max_seqlen_k at the position of clean_logits and schedule_meta at the next
    one, and its result always has max_seqlen_k columns, which are not cleaned. So a clean_logits
    that is a number and no bool is taken for max_seqlen_k, and schedule_meta is not read.
    """
    name = "fp8_fp4_mqa_logits"
    _check_dtype(name, logits_dtype)
    if _is_flag(clean_logits):
        clean = flag(name, "clean_logits", clean_logits)
        given = 0 if max_seqlen_k is None else max_seqlen_k
        width = _columns(name, "max_seqlen_k", given) or None
    else:
        if max_seqlen_k is not None:
            wanted = "None beside a number at the position of clean_logits"
            refuse(name, "max_seqlen_k", wanted, max_seqlen_k)
        clean, width = False, _columns(name, "max_seqlen_k", clean_logits)
    return _mqa_logits(name, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, width, clean)


def _refuse_shapes(name: str, q: Any, kv_cache: Any, weights: Any) -> NoReturn:
    cache = shape_of(name, "kv_cache", kv_cache)
    if len(cache) != 4 or cache[1] != 64 or cache[2] != 1:
        refuse(name, "kv_cache", "shape [blocks, 64, 1, d + 4]", list(cache))
    shape = shape_of(name, "q", q)
    if len(shape) != 4:
        refuse(name, "q", "shape [b, next_n, h, d]", list(shape))
    wanted = f"shape [b * next_n = {shape[0] * shape[1]}, h]"
    refuse(name, "weights", wanted, list(shape_of(name, "weights", weights)))


def _paged(
    name: str, q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any,
    max_context_len: int, clean_logits: Any, logits_dtype: Optional[torch.dtype], indices: None,
) -> Tensor:  # fmt: skip
    q = _values(name, q)
    if logits_dtype is not None:
        _check_dtype(name, logits_dtype)
    if indices is not None:
        refuse(name, "indices", "None", type(indices).__name__)
    columns = _columns(name, "max_context_len", max_context_len)
    if clean_logits is not False:
        clean_logits = flag(name, "clean_logits", clean_logits)
    try:
        b, next_n, _, _ = q.shape
        blocks, page_rows, one, row = kv_cache.shape
        queries, h = weights.shape
        fits = page_rows == 64 and one == 1 and queries == b * next_n
    except (AttributeError, RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        _refuse_shapes(name, q, kv_cache, weights)
    if getattr(kv_cache, "dtype", None) is not torch.uint8:
        _check_tensor(name, "kv_cache", kv_cache)
        # Torch crashes where a quantized tensor is viewed as bytes.
        if kv_cache.dtype not in _BYTES:
            refuse(name, "kv_cache", "dtype torch.uint8", kv_cache.dtype)
        kv_cache = kv_cache.view(torch.uint8)
    try:
        pages = kv_cache.view(blocks, 64 * row)
    except RuntimeError:  # their rows are not adjacent
        refuse(name, "kv_cache", "blocks that are contiguous", f"strides {kv_cache.stride()}")
    try:
        weights = weights.view(b, next_n, h)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _check_tensor(name, "weights", weights)
        refuse(name, "weights", "a dense tensor in memory", weights.layout)
    logits = _rows(queries, columns, q)
    try:
        indexer.scores_paged(
            q, pages, weights, block_table, context_lens, columns,
            clean=clean_logits, out=logits.view(b, next_n, columns),
        )  # fmt: skip
    except REFUSALS as error:
        raise renamed(name, _NAMES_OF_PAGED, error) from None
    return logits


def fp8_paged_mqa_logits(
    q: Any,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Optional[Tensor],
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    indices: None = None,
) -> Tensor:
    """The indexer's scores over a paged cache, as DeepGEMM's function of this name before 2.8.

    Args:
        q: [b, next_n, h, d], float8_e4m3fn, or a pair of that and None; h 1 to 128, d 128 or 64.
        kv_cache: [blocks, 64, 1, d + 4], uint8: in each block 64 keys, then their 64 scales as
            float32; blocks may be apart.
        weights: [b * next_n, h], float32 or bfloat16.
        context_lens: [b], int32: cached rows, the last next_n those of the queries; or [b, next_n]:
            the rows that each query sees.
        block_table: [b, n], int32.
        schedule_meta: of get_paged_mqa_logits_metadata(); not read.
        max_context_len: columns of the result.
        clean_logits: whether the columns behind the rows that a query sees are -inf; they are
            undefined otherwise.
        logits_dtype: torch.float32. indices: None.

    Returns:
        logits, [b * next_n, max_context_len], float32.

    Raises:
        ValueError: q has scales of its own, blocks of another size, another logits_dtype, indices,
            or as winnow.indexer.scores_paged().
    """
    return _paged(
        "fp8_paged_mqa_logits", q, kv_cache, weights, context_lens, block_table, max_context_len,
        clean_logits, logits_dtype, indices,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: Any,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Optional[Tensor],
    max_context_len: int,
    clean_logits: Any = False,
    logits_dtype: Optional[torch.dtype] = None,
    indices: Any = None,
) -> Tensor:
    """fp8_paged_mqa_logits() under DeepGEMM's newer name, for data in 8 bits. DeepGEMM 2.8 takes
    indices at the position of clean_logits: None or a tensor there is taken for indices."""
    name = "fp8_fp4_paged_mqa_logits"
    # A bool first: isinstance() of torch.Tensor takes a part of what a stand-in may cost.
    if type(clean_logits) is not bool and (
        clean_logits is None or isinstance(clean_logits, torch.Tensor)
    ):
        indices, clean_logits = clean_logits, False
    return _paged(
        name, q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits,
        logits_dtype, indices,
    )  # fmt: skip
