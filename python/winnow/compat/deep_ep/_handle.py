"""The handle that Buffer.dispatch() returns."""

from typing import Any

from winnow.compat.deep_ep._route import Route
from winnow.compat.deep_ep._streams import Kept


class Handle(Kept):
    """A tuple as deep_ep has it, of six on one node and ten on several, and the route.

    Of its members these are filled: rank_prefix_matrix (int32 [W, W]; [i][r] of this rank r: rows
    from ranks 0 to i; the other columns are the same memory) first of six; is_token_in_rank last
    but one of six and first of ten; recv_gbl_rank_prefix_sum (int32 [W], the same numbers) last
    but three of ten. Both are the layer's own table. The rest describe queues that are not here:
    None.
    """

    route: Route

    @classmethod
    def of(cls, route: Route, is_token_in_rank: Any) -> "Handle":
        layer, begins = route.layer, route.descriptor.source_begins
        world = begins.shape[0] - 1
        if layer.local_world_size == world:
            matrix = begins.as_strided((world, world), (1, 0), begins.storage_offset() + 1)
            handle = cls((matrix, None, None, None, is_token_in_rank, None))
        else:
            sums = begins[1:]
            handle = cls((is_token_in_rank, None, None, None, None, None, sums, None, None, None))
        handle.route = route
        return handle
