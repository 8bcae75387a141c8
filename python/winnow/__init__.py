"""Winnow: the kernels that sparse transformers need, on the CPU and on NVIDIA GPUs.

``winnow.indexer``, ``winnow.sparse_mla``, ``winnow.compressor`` and ``winnow.paged_xl`` take numpy
arrays, torch tensors, or anything with ``__dlpack__``, and return the kind that came in.
``winnow.expert_parallel`` carries tokens between the ranks of a mixture of experts.
``winnow.torch`` has the operations for ``torch.compile`` and autograd, ``winnow.compat`` functions
with the signatures of other libraries.
"""

import copyreg

from winnow import compressor, expert_parallel, indexer, paged_xl, sparse_mla
from winnow._winnow import __version__, backends, num_threads, set_num_threads
from winnow.errors import Error, InvalidArgument
from winnow.support import Support, supports

__all__ = [
    "Error",
    "InvalidArgument",
    "Support",
    "__version__",
    "backends",
    "compressor",
    "expert_parallel",
    "indexer",
    "num_threads",
    "paged_xl",
    "set_num_threads",
    "sparse_mla",
    "supports",
]

# Functions of the extension are copied and pickled by their names, as Python's own are.
copyreg.pickle(type(sparse_mla.forward), lambda function: function.__name__)
