"""Functions with the signatures and conventions of other libraries, for code that used them.

Each is a thin wrapper over a function of this package and takes what that takes.
``winnow.compat.flash_mla`` is a module that replaces ``flash_mla``, and
``winnow.compat.deep_ep`` and ``winnow.compat.deep_gemm``, which need torch, those of their names;
``install()`` puts one in that place for code that cannot be edited. The folders that ``path()``
returns do the same on PYTHONPATH, also in the processes that a server starts. What flash_mla and
deep_gemm have beyond that is passed on to the libraries themselves where they are installed.
``python -m winnow.compat check FOLDER`` lists which calls of a package they take.
"""

import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Dict

from winnow import paged_xl
from winnow.compat import flash_mla
from winnow.compat._original import has_functions_of, lock_of, original
from winnow.compat._refusal import REFUSALS, check_value, flag, refuse, renamed, shape_of
from winnow.compat.flash_mla import flash_mla_sparse_fwd

__all__ = [
    "flash_mla",
    "flash_mla_sparse_fwd",
    "install",
    "path",
    "xl_single_query_cached_kv_attention",
]

# What stands for each name in sys.modules, and where it is.
_DEEP_EP = "winnow.compat.deep_ep"
_MODULES: Dict[str, Dict[str, str]] = {
    "deep_ep": {
        "deep_ep": _DEEP_EP,
        "deep_ep.buffer": f"{_DEEP_EP}.buffer",
        "deep_ep.hybrid_ep_buffer": f"{_DEEP_EP}.hybrid_ep_buffer",
        "deep_ep.utils": f"{_DEEP_EP}.utils",
    },
    "deep_gemm": {"deep_gemm": "winnow.compat.deep_gemm"},
    "flash_mla": {
        "flash_mla": "winnow.compat.flash_mla",
        "flash_mla.flash_mla_interface": "winnow.compat.flash_mla",
        "flash_mla.fused_norm_rope_attn_rope_cast": "winnow.compat.fused_norm_rope_attn_rope_cast",
    },
}


def install(name: str) -> ModuleType:
    """Makes later imports of another library find the module here that replaces it.

    Where deep_gemm or flash_mla is installed itself, it is imported with the functions of that
    module in it.

    Args:
        name: "deep_ep", "deep_gemm" or "flash_mla".

    Returns:
        What sys.modules has under the library's name from now on: our module, or the library.

    Raises:
        ValueError: there is no such module here, or the library itself has been imported already,
            whose functions other modules may hold.
    """
    _check_name("compat.install", name)
    modules = {target: import_module(source) for target, source in _MODULES[name].items()}
    with lock_of(name):
        for target, module in modules.items():
            if not has_functions_of(module, sys.modules.get(target, module)):
                refuse("compat.install", "name", f"no {target} imported before", "one that was")
        for target, module in modules.items():
            sys.modules.setdefault(target, module)
        if name != "deep_ep":  # its objects and ours do not fit together
            with contextlib.suppress(Exception):  # which is raised where a name of it is asked for
                original(name)
    return sys.modules[name]


def path(*names: str) -> str:
    """Folders for PYTHONPATH where imports of the named libraries find what replaces them here.

    Args:
        names: of "deep_ep", "deep_gemm" and "flash_mla"; "deep_ep" if there is none.

    Returns:
        One folder for each name, joined as PYTHONPATH wants them.

    Raises:
        ValueError: there is no such module here.
    """
    names = names or ("deep_ep",)
    for name in names:
        _check_name("compat.path", name)
    return os.pathsep.join(str(Path(__file__).parent / "path" / name) for name in names)


def _check_name(operation: str, name: Any) -> None:
    if not isinstance(name, str) or name not in _MODULES:
        refuse(operation, "name", " or ".join(_MODULES), name)


def xl_single_query_cached_kv_attention(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    pos_bias_u: Any,
    matrix_bd: Any,
    scale: float,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    table_per_token: bool = False,
) -> None:
    """One decode step of relative-position attention into `out`.

    Args:
        out, query, key_cache, value_cache, pos_bias_u, matrix_bd, scale, block_tables,
            context_lens: as in winnow.paged_xl.attention().
        block_size: that of the caches.
        max_context_len: a hint that is not needed.
        table_per_token: `block_tables` has one entry per token, not one per block: every
            block_size-th entry is copied into a table by block. Each sequence's row then begins
            with the block of its first token.

    Raises:
        ValueError: block_size is not that of value_cache, or as winnow.paged_xl.attention().
    """
    name = "xl_single_query_cached_kv_attention"
    shape_of(name, "out", out)  # with None the result would go to nobody
    cache = shape_of(name, "value_cache", value_cache)
    if len(cache) != 4:
        wanted = "4 dimensions [num_blocks, num_kv_heads, head_size, block_size]"
        refuse(name, "value_cache", wanted, f"shape {list(cache)}")
    check_value(name, "block_size", cache[-1], block_size, " as in value_cache")
    if flag(name, "table_per_token", table_per_token):
        tables = shape_of(name, "block_tables", block_tables)
        if len(tables) != 2:
            refuse(name, "block_tables", "2 dimensions [num_seqs, tokens]", f"shape {list(tables)}")
        table = block_tables[:, :: max(1, cache[-1])]
        block_tables = table.contiguous() if hasattr(table, "contiguous") else table.copy()
    try:
        paged_xl.attention(
            query, key_cache, value_cache, pos_bias_u, matrix_bd, scale, block_tables, context_lens,
            out=out,
        )  # fmt: skip
    except REFUSALS as error:
        raise renamed(name, {}, error) from None
