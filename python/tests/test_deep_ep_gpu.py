"""winnow.compat.deep_ep on GPUs: ranks that share one, and processes with a GPU each."""

import deep_ep_low_latency as low_latency
import deep_ep_on_gpu
import deep_ep_programs as programs
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
]
# Sets what all threads of a process share.
OF_A_PROCESS = (programs.strange_defaults,)
each_program = pytest.mark.parametrize(
    "program", PROGRAMS, ids=["-".join([p[0].__name__, *map(str, p[1:])]) for p in PROGRAMS]
)


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


@each_program
def test_ranks_that_share_a_gpu(threads, program):
    if program == OF_A_PROCESS:
        pytest.skip("sets torch's defaults, which ranks that are threads share")
    for world in (2, 4):
        threads.run(world, *program)


@each_program
def test_a_gpu_for_each_process(pool, program):
    pool.run(2, *program)


def test_the_others_go_on_without_a_rank(pool):
    pool.run(2, low_latency.shrunk)
