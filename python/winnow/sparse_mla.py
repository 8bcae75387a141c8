"""Top-k sparse MLA attention: every query attends to the cache rows that an indexer chose for it."""

from winnow._winnow.sparse_mla import backward, distribution, forward

__all__ = ["backward", "distribution", "forward"]
