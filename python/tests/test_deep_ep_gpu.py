"""winnow.compat.deep_ep on GPUs: ranks that share one, and processes with a GPU each."""

import deep_ep_graphs as graphs
import deep_ep_late as late
import deep_ep_low_latency as low_latency
import deep_ep_on_gpu
import deep_ep_programs as programs
import deep_ep_refusals as refusals
import pytest
import torch
from deep_ep_ranks import Pool
from kinds import gpu

pytestmark = gpu

PROGRAMS = [
    (programs.layouts,),
    (programs.by_experts, 0, 1),
    (programs.by_experts, 1, 8),
    (programs.by_ranks,),
    (programs.float8,),
    (programs.worst_case,),
    (programs.strange_defaults,),
    (programs.events,),
    (programs.more_tokens,),
    (programs.hybrid, None),
    (programs.hybrid, 8),
    (programs.hybrid_grows,),
    (programs.elastic, False, True),
    (programs.elastic, True, True),
    (programs.elastic, True, False),
    (programs.elastic_scales, False),
    (programs.elastic_scales, True),
    (programs.hybrid_scales, 8),
    (low_latency.calls, False),
    (low_latency.calls, True),
    (low_latency.overlapped,),
    (low_latency.any_order,),
]
# Of two ranks or more, after programs that load the kernels.
MISTAKES = [
    (low_latency.mistakes, (low_latency.calls, False)),
    (refusals.by_token, (programs.by_experts, 0, 1)),
    (refusals.by_expert, (programs.hybrid, 8), (programs.elastic, False, True)),
]
# Sets what all threads of a process share.
OF_A_PROCESS = (programs.strange_defaults,)


def each(programs):
    ids = ["-".join([p[0].__name__, *map(str, p[1:])]) for p in programs]
    return pytest.mark.parametrize("program", programs, ids=ids)


@pytest.fixture(scope="module")
def threads():
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_on_gpu.use(patch)
        made = deep_ep_on_gpu.Threads()
        yield made
        made.close()


@pytest.fixture(scope="module")
def pool():
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    made = Pool(processes=2, device="cuda")
    yield made
    made.close()


@each([program for program in PROGRAMS if program != OF_A_PROCESS])
def test_ranks_that_share_a_gpu(threads, program):
    for world in deep_ep_on_gpu.WORLDS:
        threads.run(world, *program)


@each(PROGRAMS)
def test_a_gpu_for_each_process(pool, program):
    pool.run(2, *program)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_mistakes_are_errors_on_every_rank(threads, mistake):
    wrong, *before = mistake
    for world in (2, 3):
        for program in before:
            threads.run(world, *program)
        threads.run(world, wrong, alone_first=False)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_mistakes_of_processes(pool, mistake):
    pool.run(2, mistake[0])


def test_the_others_go_on_without_a_rank(pool):
    pool.run(2, low_latency.shrunk)


@pytest.mark.parametrize(
    "program", [(graphs.low_latency, False), (graphs.low_latency, True), (graphs.worst_case,)]
)
def test_graphs_replay_with_other_tokens(pool, program):
    pool.run(2, *program)


def test_inputs_that_another_stream_writes_late(pool):
    pool.run(2, late.elastic)
