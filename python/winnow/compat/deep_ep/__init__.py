"""A module that replaces deep_ep: the all-to-all of frameworks' expert parallelism.

Names, arguments and results are those of DeepEP. The tokens are sent by winnow.expert_parallel, on
CPU tensors or on GPUs, between any number of ranks. An invalid argument raises an error on every
rank.
``winnow.compat.install("deep_ep")`` puts it in that place for code that cannot be edited, and so
does the folder that ``python -m winnow compat-path`` prints, on PYTHONPATH. It needs torch.
"""

import torch

from winnow.compat.deep_ep import utils
from winnow.compat.deep_ep.buffer import Buffer
from winnow.compat.deep_ep.config import Config
from winnow.compat.deep_ep.elastic import ElasticBuffer, EPHandle
from winnow.compat.deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map
from winnow.compat.deep_ep.utils import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "indices_to_map",
    "topk_idx_t",
    "utils",
]

__version__ = "2.1.0"
"""The version of deep_ep whose names these are."""

topk_idx_t = torch.int64
