"""A plugin of vLLM, which loads it in each of its processes: an entry point vllm.general_plugins.

With WINNOW_VLLM=1 in the environment it makes vLLM call winnow.compat.flash_mla in the place of its
copy of flash_mla, before a model is loaded; otherwise it does nothing. What Winnow does not have
stays vLLM's: attention of packed sequences, and its fused operators.
"""

import logging
import os
import sys
from importlib import import_module
from typing import Any, Dict, Optional, Tuple

import winnow
from winnow.compat import flash_mla
from winnow.compat._refusal import refuse

__all__ = ["register"]

VERSIONS = ("0.33.0",)
"""The versions of vLLM whose names these are."""

# The copy, and the module through which vLLM calls it.
_COPY = "vllm.third_party.flashmla.flash_mla_interface"
_DOOR = "vllm.v1.attention.ops.flashmla"
_NAMES = (
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
)


def _is_supported() -> Tuple[bool, Optional[str]]:
    platform: Any = import_module("vllm.platforms").current_platform
    if platform.is_device_capability_family(90):
        return True, None
    return False, "Winnow stands behind FlashMLA (WINNOW_VLLM=1) and is for Hopper devices."


def _flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[Any] = None,
    descale_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """vLLM's function of this name: dense decode over rows of 576 values in 8 bits."""
    return flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        descale_q=descale_q,
        descale_k=descale_k,
    )


def register() -> None:
    """What vLLM calls.

    Raises:
        ValueError: WINNOW_VLLM=1, and vLLM is of another version or lacks a name.
    """
    if os.environ.get("WINNOW_VLLM") != "1":
        return
    version = str(import_module("vllm").__version__)
    if version.split("+")[0] not in VERSIONS:
        wanted = f"{' or '.join(VERSIONS)}, or no WINNOW_VLLM=1"
        refuse("winnow.compat.vllm_plugin", "vllm", wanted, version)
    door = import_module(_DOOR)
    sys.modules.setdefault(_COPY, flash_mla)  # without its operators the door has not imported it
    ours: Dict[str, Any] = {name: getattr(flash_mla, name) for name in _NAMES}
    ours["flash_mla_with_kvcache_fp8"] = _flash_mla_with_kvcache_fp8
    ours["get_mla_metadata_dense_fp8"] = flash_mla.get_mla_decoding_metadata
    ours["is_flashmla_sparse_supported"] = _is_supported
    ours["is_flashmla_dense_supported"] = _is_supported
    theirs = {name: getattr(door, name, None) for name in ours}
    if missing := [name for name, found in theirs.items() if found is None]:
        refuse("winnow.compat.vllm_plugin", _DOOR, f"a module with {missing[0]}", version)
    # Also in the modules that have imported them from there before.
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.") and m]:
        for name, found in theirs.items():
            if vars(module).get(name) is found:
                setattr(module, name, ours[name])
    logging.getLogger("vllm.winnow").info(
        "Winnow %s stands behind %s of vLLM %s", winnow.__version__, _DOOR, version
    )
