"""The low-latency calls of winnow.compat.deep_ep.Buffer between processes."""

import inspect

import deep_ep_low_latency as programs
import pytest
from winnow.compat import deep_ep


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("with_hook", [False, True], ids=["whole", "halves"])
def test_rows_scales_and_sums(deep_ep_pool, world, with_hook):
    deep_ep_pool.run(world, programs.calls, with_hook)


def test_two_batches_overlap(deep_ep_pool):
    deep_ep_pool.run(3, programs.overlapped)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_hooks_in_any_order(deep_ep_pool, world):
    deep_ep_pool.run(world, programs.any_order)


def test_mistakes_are_errors_on_every_rank(deep_ep_pool):
    deep_ep_pool.run(3, programs.mistakes)


@pytest.mark.parametrize("world", [1, 3])
def test_events(deep_ep_pool, world):
    deep_ep_pool.run(world, programs.asynchronous)


def test_waits_for_a_late_rank_are_counted(deep_ep_pool):
    deep_ep_pool.run(3, programs.waited)


def test_defaults_of_torch(deep_ep_pool):
    deep_ep_pool.run(2, programs.strange_defaults)


def test_arguments_of_forks_are_refused_by_name():
    buffer = deep_ep.Buffer.__new__(deep_ep.Buffer)
    for name in ("use_nvfp4", "x_global_scale"):
        with pytest.raises(TypeError, match=name):
            buffer.low_latency_dispatch(None, None, 1, 1, **{name: True})
    for name in ("overlap", "comp_signal", "src_signals"):
        with pytest.raises(TypeError, match=name):
            buffer.low_latency_combine(None, None, None, None, **{name: True})


def test_the_others_go_on_without_a_rank(deep_ep_pool):
    deep_ep_pool.run(3, programs.shrunk)


def test_signatures_name_every_parameter():
    def names(function):
        return list(inspect.signature(function).parameters)[1:]

    assert names(deep_ep.Buffer.low_latency_dispatch) == [
        "x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts",
        "cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats", "use_fp8",
        "round_scale", "use_ue8m0", "async_finish", "return_recv_hook",
    ]  # fmt: skip
    assert names(deep_ep.Buffer.low_latency_combine) == [
        "x", "topk_idx", "topk_weights", "handle", "use_logfmt", "zero_copy", "async_finish",
        "return_recv_hook", "out", "combine_wait_recv_cost_stats",
    ]  # fmt: skip
