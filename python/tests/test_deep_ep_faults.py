"""winnow.compat.deep_ep where a rank is late, masked, stopped or killed."""

import deep_ep_faults as faults
import pytest
from deep_ep_ranks import Pool

KINDS = ["buffer", "low_latency", "hybrid", "elastic"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_after_a_rank_that_is_late_the_next_call_works(deep_ep_pool, world, kind):
    deep_ep_pool.run(world, faults.late, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_try_again_meet(deep_ep_pool, kind):
    deep_ep_pool.run(2, faults.retried, kind)


# A rank that is late to the first call is masked, masks are those of all calls, a masked rank that
# calls is told so, and a layer for GPUs is not made without the masked ranks.
@pytest.mark.parametrize(
    "body", [faults.late_and_masked, faults.masked, faults.told, faults.of_gpus]
)
def test_masks(deep_ep_pool, body):
    deep_ep_pool.run(3, body)


@pytest.mark.parametrize("kind", ["buffer", "hybrid", "elastic"])
def test_a_stopped_rank_is_named(deep_ep_pool, kind):
    deep_ep_pool.run(3, faults.stopped, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", [False, True], ids=["to-make", "made"])
def test_an_interrupted_rank_is_named(deep_ep_pool, kind, made):
    deep_ep_pool.run(2, faults.interrupted, kind, made)


def test_a_killed_rank_is_named():
    """One after the other: each time the last of those that are left."""
    pool = Pool(processes=5)
    try:
        for world, kind in ((5, "low_latency"), (4, "buffer"), (3, "hybrid"), (2, "elastic")):
            pool.run(world, faults.killed, kind, lost=[world - 1])
    finally:
        pool.close()
