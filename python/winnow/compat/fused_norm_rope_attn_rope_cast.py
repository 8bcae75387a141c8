"""FlashMLA's fused attention of V4.1 by name, which programs import without calling it. Each
function is FlashMLA's own where that is installed; otherwise it raises an error that says what
there is in its place."""

from typing import Any, NoReturn

from winnow.compat._original import passed_on
from winnow.compat._refusal import refuse_call

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_theirs = passed_on("flash_mla", "fused_norm_rope_attn_rope_cast")


def _refuse(name: str, instead: str) -> NoReturn:
    refuse_call(
        f"fused_norm_rope_attn_rope_cast.{name}",
        f"the norm, the rotation and the cast are not fused here; {instead}",
    )


@_theirs
def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    """FlashMLA's own, or an error."""
    _refuse("prefill", "flash_mla_sparse_fwd is the attention between them")


@_theirs
def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """FlashMLA's own, or an error."""
    _refuse("decode", "flash_mla_with_kvcache is the attention between them")


@_theirs
def permute_q_b_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """FlashMLA's own, or an error."""
    _refuse("permute_q_b_proj", "weights keep their order")


@_theirs
def permute_wv_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """FlashMLA's own, or an error."""
    _refuse("permute_wv_proj", "weights keep their order")
