"""Top-k sparse MLA attention: each query attends to the cache rows chosen for it."""

from winnow._winnow.sparse_mla import backward, distribution, forward

__all__ = ["backward", "distribution", "forward"]
