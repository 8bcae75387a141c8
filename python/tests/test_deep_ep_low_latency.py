"""The low-latency calls of winnow.compat.deep_ep.Buffer between processes."""

import deep_ep_low_latency as programs
import pytest
from winnow.compat import deep_ep

# {what is tested: (numbers of ranks, program, its arguments)}
PROGRAMS = {
    "rows, scales and sums": ((1, 2, 3, 4, 6), programs.calls, False),
    "rows, scales and sums, in halves": ((1, 2, 3, 4, 6), programs.calls, True),
    "two batches overlap": ((3,), programs.overlapped),
    "experts overlap": ((1, 3), programs.overlaps_its_experts),
    "hooks in any order": ((1, 3, 4), programs.any_order),
    "mistakes are errors on every rank": ((3,), programs.mistakes),
    "events": ((1, 3), programs.asynchronous),
    "waits for a late rank are counted": ((3,), programs.waited),
    "defaults of torch": ((2,), programs.strange_defaults),
    "the others go on without a rank": ((3,), programs.shrunk),
}


@pytest.mark.parametrize(
    ("what", "world"), [(what, world) for what, (of, *_) in PROGRAMS.items() for world in of]
)
def test_ranks(deep_ep_pool, what, world):
    deep_ep_pool.run(world, *PROGRAMS[what][1:])


def test_arguments_of_forks_are_refused_by_name():
    buffer = deep_ep.Buffer.__new__(deep_ep.Buffer)
    for name in ("use_nvfp4", "x_global_scale"):
        with pytest.raises(TypeError, match=name):
            buffer.low_latency_dispatch(None, None, 1, 1, **{name: True})
