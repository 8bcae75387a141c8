"""Top-k sparse MLA attention: each query attends to the cache rows chosen for it."""

from winnow._winnow.sparse_mla import backward, decode, distribution, forward, store

__all__ = ["backward", "decode", "distribution", "forward", "store"]
