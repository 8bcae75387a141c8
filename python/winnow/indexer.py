"""The lightning indexer of DeepSeek Sparse Attention: which rows each query attends to."""

from winnow._winnow.indexer import backward, quantize, scores, scores_paged, topk, topk_paged

__all__ = ["backward", "quantize", "scores", "scores_paged", "topk", "topk_paged"]
