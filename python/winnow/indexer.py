"""The lightning indexer of DeepSeek Sparse Attention: which rows each query attends to."""

from winnow._winnow.indexer import backward, scores, topk

__all__ = ["backward", "scores", "topk"]
