"""A module that replaces flash_mla: its functions for sparse attention and for decode.

Layouts, argument names, the shape of lse and its +inf for queries with nothing visible are those of
FlashMLA. There is no plan to make: ``get_mla_metadata`` gives an object that nothing reads, lengths
may change between calls, and every number of heads is taken. Dense attention is here for decode
alone; its other functions, and every other name, are FlashMLA's own where that is installed, and
otherwise raise an error. Arguments that only SGLang's build of FlashMLA has are taken by keyword.
"""

import dataclasses
import math
import operator
import sys
from typing import Any, Dict, NoReturn, Optional, Tuple

from winnow import sparse_mla
from winnow.compat import fused_norm_rope_attn_rope_cast
from winnow.compat._original import original, passed_on
from winnow.compat._refusal import (
    REFUSALS,
    check_value,
    flag,
    refuse,
    refuse_call,
    renamed,
    shape_of,
)  # fmt: skip

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

__version__ = "1.0.0"
"""The version of flash_mla whose functions these are."""

flash_mla_interface = sys.modules[__name__]  # the submodule that has the functions in FlashMLA

# The arguments of winnow.sparse_mla whose names here are others.
_NAMES_OF_DECODE = {
    "cache": "k_cache",
    "scale": "softmax_scale",
    "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
    "block_tables": "block_table",
    "context_lens": "cache_seqlens",
    "q_scale": "descale_q",
    "kv_scale": "descale_k",
    "": "q",  # an array of numpy, which has no bfloat16
}
_NAMES_OF_FORWARD = {"scale": "sm_scale"}

# Bytes of a cached row: what holds such rows here, SGLang's name for them, and what else there is.
_FORMATS = {656: "fp8_656", 584: "fp8_584"}
_KV_FORMATS = {"V32": 656, "V4": 584}
_NOT_READ = {528: "V4.1, or V3.2 without rotated columns", 352: "NVFP4", 288: "V4.1 in 4 bits"}


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What get_mla_metadata() returns. Nothing here reads or changes it."""

    have_initialized: bool = False
    config: Optional[Any] = None
    tile_scheduler_metadata: Optional[Any] = None
    num_splits: Optional[Any] = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> Tuple[FlashMLASchedMeta, None]:
    """A stand-in for FlashMLA's plan of a call, of any arguments: (metadata, None)."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    cache_seqlens: Any,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: Optional[int] = None,
    is_fp8_kvcache: bool = False,
    topk: Optional[int] = None,
    *,
    use_legacy: bool = True,
) -> Tuple[Any, Any]:
    """A stand-in for the plan of SGLang's build, as the tensors that its engine copies:
    (metadata [1, 8], splits [b + 1]), int32. Both are 0, and nothing here reads them."""
    import torch

    name = "get_mla_decoding_metadata"
    shape = shape_of(name, "cache_seqlens", cache_seqlens)
    if len(shape) != 1 or not isinstance(cache_seqlens, torch.Tensor):
        got = f"{type(cache_seqlens).__name__} of shape {list(shape)}"
        refuse(name, "cache_seqlens", "a tensor [b] of torch", got)
    plan = torch.zeros((1, 8), dtype=torch.int32, device=cache_seqlens.device)
    return plan, plan.new_zeros(shape[0] + 1)


_log2_e_of: Dict[Any, Any] = {}  # by dtype


def _to_base_2(max_logits: Any, lse: Any) -> None:
    """From natural logarithms, in place."""
    dtype = lse.dtype
    try:
        log2_e = _log2_e_of[dtype]
    except KeyError:
        log2_e = math.log2(math.e)
        if str(dtype).startswith("torch."):  # a product with a number would take 4 us longer
            log2_e = sys.modules["torch"].tensor(log2_e, dtype=dtype, device="cpu")
        _log2_e_of[dtype] = log2_e
    max_logits *= log2_e
    lse *= log2_e


def _lse(lse: Any) -> Any:
    """That of decode as FlashMLA has it: [b, h_q, s_q]."""
    try:
        return lse.mT
    except AttributeError:
        return lse.swapaxes(1, 2)


_dtype_of_bytes: Dict[Any, Any] = {}  # uint8 for torch's int8, by dtype


def _bytes(cache: Any) -> Any:
    """FlashMLA takes caches of int8, too."""
    dtype = getattr(cache, "dtype", None)
    try:
        bytes_ = _dtype_of_bytes[dtype]
    except KeyError:
        is_int8 = str(dtype) == "torch.int8"
        bytes_ = _dtype_of_bytes[dtype] = sys.modules["torch"].uint8 if is_int8 else None
    return cache if bytes_ is None else cache.view(bytes_)


def _is_plain(cache: Any) -> bool:
    """Whether the cache has rows of 576 values in 8 bits, without scales."""
    try:
        return cache.shape[-1] == 576 and cache.itemsize == 1
    except (AttributeError, IndexError, RuntimeError, TypeError):  # which decode refuses
        return False


def _scale(operation: str, argument: str, scale: Any, plain: bool) -> Any:
    """The scale of a plain cache or of its queries, as one row of one value."""
    if scale is None:
        return None
    if not plain:
        refuse(operation, argument, "None: caches have scales of their own", type(scale).__name__)
    return scale.reshape(1) if shape_of(operation, argument, scale) == () else scale


def _format_of(operation: str, argument: str, cache: Any) -> int:
    """Bytes of the cache's rows, of which there is a format."""
    try:
        row = cache.shape[-1]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        row = (shape_of(operation, argument, cache) or ("one number",))[-1]
    if row not in _FORMATS:
        known = f" ({_NOT_READ[row]})" if row in _NOT_READ else ""
        size = getattr(getattr(cache, "dtype", None), "itemsize", 1)
        bytes_or_none = size == 1 or not isinstance(row, int)
        got = f"{row}{known}" if bytes_or_none else f"{row} elements of {size} bytes"
        refuse(operation, argument, "rows of 656 bytes (V3.2) or 584 bytes (V4)", got)
    return row


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Optional[Any],
    cache_seqlens: Optional[Any],
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[Any] = None,
    attn_sink: Optional[Any] = None,
    extra_k_cache: Optional[Any] = None,
    extra_indices_in_kvcache: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    extra_topk_length: Optional[Any] = None,
    out: Optional[Any] = None,
    enable_batch_invariant: bool = False,
    *,
    use_legacy: Optional[bool] = None,
    kv_format: Optional[str] = None,
    descale_q: Optional[Any] = None,
    descale_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """MLA decode as FlashMLA's function of this name: over chosen rows of an f8 cache, or without
    indices over all rows of each sequence.

    Args:
        q: [b, s_q, h_q, 576 or 512], bfloat16; with a cache of "fp8_576" also float8_e4m3fn.
        k_cache: [blocks, block_size, 1, 656 or 584], float8_e4m3fn, uint8 or int8: the formats
            "fp8_656" and "fp8_584" of winnow.sparse_mla.decode(). Without indices 656 or 576
            ("fp8_576", whatever is_fp8_kvcache says), or [..., 576], bfloat16; on the CPU also
            [..., 512].
        block_table: [b, max_blocks], int32; rows of a block outside of the cache are not seen.
            cache_seqlens: [b], int32. Neither is read beside indices.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: of get_mla_metadata(); not read.
        softmax_scale: of the logits; 1 / sqrt(d_qk) if None.
        causal: False beside indices; without, True means that query s sees the first
            cache_seqlens - s_q + s + 1 rows, and False that each sees all.
        is_fp8_kvcache: whether k_cache is one; True beside indices.
        indices: [b, s_q, topk], int32: block * block_size + offset.
        attn_sink: [h_q], float32.
        extra_k_cache, extra_indices_in_kvcache: a second cache and its indices.
        topk_length, extra_topk_length: [b], int32; [b, s_q] is taken, too.
        out: [b, s_q, h_q, 512], bfloat16, to write into; new if None.
        enable_batch_invariant: the last bits do not depend on the batch.
        use_legacy: a choice between kernels of SGLang's build; not read.
        kv_format: "V32" or, with indices, "V4": what the rows of k_cache say as well.
        descale_q, descale_k: one number each, float32, of "fp8_576": what q and the rows are
            multiplied by; 1 if None.

    Returns:
        (out [b, s_q, h_q, 512], lse [b, h_q, s_q]); natural logarithms without the sink, +inf for a
        query with nothing visible, where winnow.sparse_mla.decode() gives -inf. As with FlashMLA
        the last bits depend on the batch by default; those of winnow.sparse_mla.decode() do not.

    Raises:
        ValueError: head_dim_v is not 512, causal or not is_fp8_kvcache beside indices, an argument
            of sparse decode without them, a cache of another format, or as
            winnow.sparse_mla.decode().
    """
    name = "flash_mla_with_kvcache"
    if type(head_dim_v) is not int or head_dim_v != 512:
        check_value(name, "head_dim_v", 512, head_dim_v)
    plain = indices is None and _is_plain(k_cache)
    if descale_q is not None or descale_k is not None:
        descale_q = _scale(name, "descale_q", descale_q, plain)
        descale_k = _scale(name, "descale_k", descale_k, plain)
    if enable_batch_invariant is not False:
        enable_batch_invariant = flag(name, "enable_batch_invariant", enable_batch_invariant)
    if causal is not False:
        causal = flag(name, "causal", causal)
    if is_fp8_kvcache is not True:
        is_fp8_kvcache = flag(name, "is_fp8_kvcache", is_fp8_kvcache)
    if indices is None:
        if block_table is None or cache_seqlens is None:
            argument = "block_table" if block_table is None else "cache_seqlens"
            refuse(name, argument, "a tensor without indices", "None")
        dense = attn_sink is extra_k_cache is extra_indices_in_kvcache is topk_length is None
        if not dense or extra_topk_length is not None:
            for argument, value in (
                ("attn_sink", attn_sink),
                ("extra_k_cache", extra_k_cache),
                ("extra_indices_in_kvcache", extra_indices_in_kvcache),
                ("topk_length", topk_length),
                ("extra_topk_length", extra_topk_length),
            ):
                if value is not None:
                    refuse(name, argument, "None without indices", type(value).__name__)
        if kv_format is not None and str(kv_format) != "V32":
            refuse(name, "kv_format", "None or V32 without indices", kv_format)
        if plain and str(getattr(q, "dtype", "")) == "torch.float8_e4m3fn":
            q = q.bfloat16()  # exact
        try:
            out, lse = sparse_mla.decode(
                q,
                _bytes(k_cache) if plain or is_fp8_kvcache else k_cache,
                format="fp8_576" if plain else "fp8_656" if is_fp8_kvcache else "bf16",
                scale=softmax_scale,
                block_tables=block_table,
                context_lens=cache_seqlens,
                batch_invariant=enable_batch_invariant,
                out=out,
                q_scale=descale_q,
                kv_scale=descale_k,
                causal=causal,
                flash_mla_lse=True,
            )
        except REFUSALS as error:
            raise renamed(name, _NAMES_OF_DECODE, error) from None
        return out, _lse(lse)
    if causal:
        refuse(name, "causal", "False beside indices", causal)
    if not is_fp8_kvcache:
        refuse(name, "is_fp8_kvcache", "True beside indices", is_fp8_kvcache)
    row = _format_of(name, "k_cache", k_cache)
    if kv_format is not None and _KV_FORMATS.get(str(kv_format)) != row:
        wanted = next(known for known, of in _KV_FORMATS.items() if of == row)
        refuse(name, "kv_format", f"{wanted} for rows of {row} bytes", kv_format)
    if extra_k_cache is not None:
        _format_of(name, "extra_k_cache", extra_k_cache)
        extra_k_cache = _bytes(extra_k_cache)
    try:
        out, lse = sparse_mla.decode(
            q,
            _bytes(k_cache),
            indices,
            format=_FORMATS[row],
            scale=softmax_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_cache=extra_k_cache,
            extra_indices=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
            batch_invariant=enable_batch_invariant,
            flash_mla_lse=True,
            out=out,
        )
    except REFUSALS as error:
        raise renamed(name, _NAMES_OF_DECODE, error) from None
    return out, _lse(lse)


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    out: Optional[Any] = None,
    *,
    indexer_topk: int = 0,
    use_legacy: Optional[bool] = None,
    return_log2_lse: Optional[bool] = None,
) -> Tuple[Any, ...]:
    """Sparse MLA prefill as FlashMLA's function of this name.

    Args:
        q: [s_q, h_q, d_qk]; kv: [s_kv, 1, d_qk]; indices: [s_q, 1, topk], int32.
        sm_scale: of the logits.
        d_v: 512.
        attn_sink: [h_q], float32. topk_length: [s_q], int32.
        out: [s_q, h_q, 512], as q, to write into; new if None.
        indexer_topk: if not 0, a further result is the lse over that many first entries of
            indices, at the price of a second call: an argument of FlashMLA's branch nv_dev.
        use_legacy: a choice between kernels of SGLang's build; not read.
        return_log2_lse: max_logits and lse are in base 2.

    Returns:
        (out [s_q, h_q, 512], max_logits [s_q, h_q], lse [s_q, h_q]), and with indexer_topk the
        other lse; natural logarithms without the sink. A query with nothing visible has max_logits
        = -inf and lse = +inf: FlashMLA's convention, where winnow.sparse_mla.forward() gives -inf.

    Raises:
        ValueError: d_v is not 512, indexer_topk is no number of entries, or as
            winnow.sparse_mla.forward().
    """
    name = "flash_mla_sparse_fwd"
    if type(d_v) is not int or d_v != 512:
        check_value(name, "d_v", 512, d_v)
    if sm_scale is None:
        refuse(name, "sm_scale", "a number", sm_scale)
    if getattr(indices, "ndim", 3) != 3:
        shape = list(shape_of(name, "indices", indices))
        refuse(name, "indices", "3 dimensions [s_q, 1, topk]", f"shape {shape}")
    try:
        first = operator.index(indexer_topk)
    except TypeError:
        first = -1
    if first < 0:
        refuse(name, "indexer_topk", "0 or a number of entries", indexer_topk)
    log2 = return_log2_lse
    if log2 is not None and log2 is not True:
        log2 = flag(name, "return_log2_lse", log2)
    try:
        results = sparse_mla.forward(
            q, kv, indices, scale=sm_scale, topk_length=topk_length, attn_sink=attn_sink,
            flash_mla_lse=True, out=out,
        )  # fmt: skip
    except REFUSALS as error:
        raise renamed(name, _NAMES_OF_FORWARD, error) from None
    if log2:
        _to_base_2(results[1], results[2])
    if not first:
        return results
    entries = indices[..., :first]
    of_indexer = flash_mla_sparse_fwd(
        q, kv, entries, sm_scale, topk_length=topk_length, return_log2_lse=log2
    )
    return (*results, of_indexer[2])


def __getattr__(name: str) -> Any:
    found = None if name.startswith("__") else original("flash_mla")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(found, name)


def _dense(name: str) -> NoReturn:
    refuse_call(name, "dense attention is not here; torch's scaled_dot_product_attention has it")


@passed_on("flash_mla")
def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: FlashMLA's own, or an error."""
    _dense("flash_attn_varlen_func")


@passed_on("flash_mla")
def flash_attn_varlen_qkvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: FlashMLA's own, or an error."""
    _dense("flash_attn_varlen_qkvpacked_func")


@passed_on("flash_mla")
def flash_attn_varlen_kvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: FlashMLA's own, or an error."""
    _dense("flash_attn_varlen_kvpacked_func")
