"""One sequence over the ranks of a group; public as winnow.torch.context_parallel.

Each rank has some of the tokens: their queries stay on it, and their rows, which are small where
all heads share them, are gathered from all ranks. torch.distributed moves all bytes. Gathering runs
while the caller goes on, and so does the sum of the rows' gradients in the backward pass.

    context = context_parallel(group, placement="balanced")   # once
    tokens = context.tokens(count)                             # once for each shape
    rows = tokens.gather(kv)                                   # begins
    q = project(x)                                             # meanwhile
    out = tokens.sparse_mla_attention(q, rows, indices)

Every call with a handle that gather() returned, and every call of context_parallel(), tokens(),
gather(), history(), compressor_forward() and indexer_loss(), is one that all ranks of the group
make, in the same order. What has to be the same on all ranks is compared in every call, and what
one rank refuses is an error on all of them. A rank that does not take part is the group's error on
all others, within the group's timeout.
"""

from winnow.context_parallel.group import ContextParallel, context_parallel
from winnow.context_parallel.rows import Rows
from winnow.context_parallel.tokens import Tokens
from winnow.context_parallel.windows import Windows

__all__ = ["ContextParallel", "Rows", "Tokens", "Windows", "context_parallel"]
