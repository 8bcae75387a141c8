"""Reports what this machine and this build can do."""

from dataclasses import dataclass
from typing import Optional

from winnow import _winnow


@dataclass(frozen=True)
class Support:
    """The answer of supports(): true or false, with the backend or the reason."""

    supported: bool
    backend: Optional[str]
    """The backend that would run, one of winnow.backends(); None if none would."""
    reason: str
    """Why none would; empty if one would."""

    def __bool__(self) -> bool:
        return self.supported


def supports(
    op: str,
    *,
    dtype: object = "float32",
    device: object = "cpu",
    backend: Optional[str] = None,
    **shape: int,
) -> Support:
    """Whether an operation can run: a dry run on tensors that are only described.

    For "expert_parallel.dispatch", "combine" and "notify" it is a layer of one rank in this
    process, of those sizes, and a call without tokens.

    Args:
        op: the function of an operation, such as "sparse_mla.forward"; "expert_parallel.dispatch"
            and "expert_parallel.combine" are those of a layer. The error for another name lists
            all of them.
        dtype: of the queries, of the cache (decode and store), or of the tokens: "float32",
            "float16", "bfloat16", "float64" (of sparse_mla, compressor and paged_xl
            on the CPU), "float8_e4m3fn", or a dtype of numpy or torch.
        device: "cpu", "cuda" or "cuda:1", or a device of torch.
        backend: asks for this one alone.
        **shape: sizes by the names in the operation's documentation: s_q, h_q, s_kv, d_qk, topk,
            s_extra, extra_topk; b, n, blocks, num_pages; num_seqs, num_tokens, num_heads,
            num_kv_heads, head_size, num_blocks, block_size; max_tokens, hidden, topk, experts (of
            one rank), world_size, local_world_size, channels.
            What is not given is a usual size, or 1 where any will do; without s_extra there is
            no second source of rows.

    Raises:
        ValueError: an unknown operation, dtype, device or backend.
        TypeError: a size that the operation does not have.

    >>> bool(supports("sparse_mla.forward", dtype="bfloat16", h_q=128))
    True
    >>> supports("sparse_mla.forward", d_qk=128).reason
    'sparse_mla::forward: q: want d_qk = 576 or 512, got d_qk = 128'
    """
    found, reason = _winnow.supports(str(op).replace("::", "."), dtype, str(device), backend, shape)
    return Support(found != "", found or None, reason)
