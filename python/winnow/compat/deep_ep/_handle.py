"""The handle that Buffer.dispatch() returns."""

from typing import Any

import torch

from winnow.compat.deep_ep._route import Route


class Handle(tuple):
    """A tuple as deep_ep has it, of six on one node and ten on several, and the route.

    Of its members these are filled: rank_prefix_matrix (int32 [W, W]; [i][r] of this rank r: rows
    from ranks 0 to i) first of six; is_token_in_rank last but one of six and first of ten;
    recv_gbl_rank_prefix_sum (int32 [W], the same numbers) last but three of ten. The rest describe
    queues that are not here: None.
    """

    route: Route

    @classmethod
    def of(cls, route: Route, is_token_in_rank: Any) -> "Handle":
        layer, begins = route.layer, route.descriptor.source_begins
        world = begins.shape[0] - 1
        if layer.local_world_size == world:
            matrix = torch.outer(begins[1:], route.own_column)
            handle = cls((matrix, None, None, None, is_token_in_rank, None))
        else:
            sums = begins[1:].clone()
            handle = cls((is_token_in_rank, None, None, None, None, None, sums, None, None, None))
        handle.route = route
        return handle
