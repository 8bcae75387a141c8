"""deep_ep.Config: sizes of chunks, which nothing here needs."""

import operator

from winnow.compat._refusal import refuse

__all__ = ["Config"]


class Config:
    """Tuning of deep_ep's kernels. No call reads it: layers choose for themselves, and
    Buffer.num_sms says how many SMs they use. The hints are what deep_ep would take."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        for name, value in list(locals().items()):
            try:
                right = name == "self" or operator.index(value) >= 0
            except (RuntimeError, TypeError, ValueError):
                right = False
            if not right:
                refuse("deep_ep.Config", name, "a whole number, 0 or more", value)
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_nvl_bytes: rows of every rank in every channel, a multiple of 128."""
        ranks = min(num_ranks, 8)
        rows = max(self.num_sms // 2, 1) * ranks * self.num_max_nvl_chunked_recv_tokens
        return -(-rows * (hidden_bytes + _BESIDE) // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for num_rdma_bytes; 0 for 8 ranks or fewer, which are one node."""
        if num_ranks <= 8:
            return 0
        nodes = -(-num_ranks // 8)
        rows = max(self.num_sms // 2, 1) * nodes * self.num_max_rdma_chunked_recv_tokens
        return -(-2 * rows * (hidden_bytes + _BESIDE) // 128) * 128


# Of a row: 128 indices, weights and scales, and where it comes from.
_BESIDE = 128 * (8 + 4 + 4) + 8
