"""Long use, many threads, fork, and machines without a GPU."""

import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import problems
import pytest
import torch
from expert_problems import SMALL, payload, routing
from processes import python
from ranks import Ranks, run_each

import winnow
from winnow import indexer, sparse_mla


def _hash(results):
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result).tobytes())
    return digest.hexdigest()


class Held:
    """What this process holds, without garbage and what the allocator keeps for later."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            self.bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        self.objects = sys.getallocatedblocks()

    def expect_no_more(self):
        now = Held()
        assert now.bytes <= self.bytes + (4 << 20)
        assert now.objects <= self.objects + 500  # of caches, and of the test itself


def _call(arguments):
    out, _, lse = sparse_mla.forward(*arguments)
    return out, lse, *sparse_mla.backward(*arguments, out, lse, out)


@pytest.fixture
def one_thread():
    before = winnow.num_threads()
    winnow.set_num_threads(1)
    yield
    winnow.set_num_threads(before)


def test_soak(one_thread):
    """10,000 calls of random sizes, forward and backward: the same bits, no growth in memory or
    time."""
    rng = np.random.default_rng(0)
    shapes = [
        {"seed": i, "s_q": int(rng.integers(0, 3)), "h_q": int(rng.integers(1, 4)),
         "s_kv": int(rng.integers(0, 12)), "topk": int(rng.integers(0, 6)), "d_qk": 512}
        for i in range(40)
    ]  # fmt: skip
    cases = [problems.sparse_mla(**shape)[:3] for shape in shapes]
    as_torch = [[torch.from_numpy(a) for a in case] for case in cases]
    want = [_hash(_call(case)) for case in cases]
    # Not a high percentile, which tells what else the machine does: on a busy one many calls are
    # slow, but a call that has more to do is slow each time.
    settled, first, last = None, {}, {}
    for i in range(10000):
        which = int(rng.integers(len(cases)))
        arguments = (cases, as_torch)[i % 2][which]
        start = time.perf_counter()
        results = _call(arguments)
        seconds = time.perf_counter() - start
        assert _hash(results) == want[which]
        fastest, case = first if i < 1000 else last if i >= 9000 else {}, (which, i % 2)
        fastest[case] = min(seconds, fastest.get(case, seconds))
        if i == 1000:
            settled = Held()
    settled.expect_no_more()
    both = first.keys() & last.keys()
    assert both  # three times, since processors share caches and clocks
    assert sum(last[case] for case in both) <= 3 * sum(first[case] for case in both)


def test_calls_of_the_all_to_all_leave_nothing():
    """Of random sizes; what comes of them when ranks dawdle, all_to_all_soak.cc has."""
    rng = np.random.default_rng(1)
    cases = [(payload(0, n), routing(rng, n)) for n in range(9)]
    cases += [tuple(map(torch.from_numpy, case)) for case in cases]

    def call(layer, rank):
        for tokens, experts in cases:
            got = layer.dispatch(tokens, experts)
            layer.combine(got.output, got.descriptor)

    settled = None
    with Ranks(2, **{**SMALL, "max_tokens": 9}) as ranks:
        for times in range(150):
            ranks.run(call)
            if times == 30:
                settled = Held()
    settled.expect_no_more()


def test_eight_threads(one_thread):
    cases = [problems.sparse_mla(seed=i)[:3] for i in range(8)]
    want = [_hash(_call(case)) for case in cases]

    def work(which):
        return all(_hash(_call(cases[which])) == want[which] for _ in range(50))

    assert run_each(8, work, seconds=120) == [True] * 8


def _topk():
    q, k, weights = (np.ones(shape, "f4") for shape in ((1, 1, 128), (512, 128), (1, 1)))
    return indexer.topk(q, k, weights, 9)


def _topk_paged():
    q = torch.ones(1, 1, 64, 128).to(torch.float8_e4m3fn)
    pages, length = torch.zeros(1, 64 * 132, dtype=torch.uint8), torch.tensor([512])
    tables = torch.zeros(1, 8, dtype=torch.int32)
    return indexer.topk_paged(q, pages, torch.ones(1, 1, 64), tables, length.int(), 512)


def _indexer_backward():
    q, k, weights = (np.ones(shape, "f4") for shape in ((64, 1, 128), (9, 128), (64, 1)))
    indices, d_scores = np.zeros((64, 1024), "i4"), np.ones((64, 1024), "f4")
    return indexer.backward(q, k, weights, indices, d_scores)


def _backward():
    q, kv, d_out = (np.ones(shape, "f4") for shape in ((64, 1, 576), (9, 1, 576), (64, 1, 512)))
    indices, lse = np.zeros((64, 1, 1024), "i4"), np.ones((64, 1), "f4")
    return sparse_mla.backward(q, kv, indices, d_out, lse, d_out)


@pytest.mark.parametrize("call", [_topk, _topk_paged, _indexer_backward, _backward])
def test_threads_that_nothing_is_left_for_cost_nothing(one_thread, call):
    """40,000 took between 5 and 40 seconds, and gigabytes: a part of the work for each."""
    expected = call()
    winnow.set_num_threads(40_000)
    begin = time.process_time()
    found = call()
    assert time.process_time() - begin < 2
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_interpreter_runs_while_the_library_works(one_thread):
    q, kv, indices, _ = problems.sparse_mla(s_q=64, h_q=128, s_kv=512, topk=512)
    ticks, calls, done = [], [], threading.Event()

    def work():
        for _ in range(5):
            start = time.monotonic()
            sparse_mla.forward(q, kv, indices)
            calls.append((start, time.monotonic()))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        ticks.append(time.monotonic())
        time.sleep(0.001)
    thread.join()
    # With the lock held throughout a call, this thread would tick at its two ends at most. The
    # median: on a busy machine the other thread may lose its processor between the two clocks.
    during = [sum(start < tick < end for tick in ticks) for start, end in calls]
    assert sorted(during)[2] > 4, (during, calls)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_calls_the_library():
    case = problems.sparse_mla()[:3]
    want = _hash(_call(case))
    child = os.fork()
    if child == 0:
        os._exit(0 if _hash(_call(case)) == want else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


# A driver of CUDA 11.2 that shows an H100.
OLD_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int* version) { return *version = 11020, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGetName(char* name, int size, int gpu) { return strncpy(name, "H100", size), gpu; }
int cuDeviceTotalMem_v2(size_t* bytes, int gpu) { return *bytes = 80ull << 30, gpu; }
int cuDeviceGetAttribute(int* value, int which, int gpu) {
  return *value = which == 75 ? 9 : 0, gpu;
}
"""

MACHINES = {
    "no-visible-gpu": {"CUDA_VISIBLE_DEVICES": ""},
    "no-driver": {"LD_LIBRARY_PATH": "{broken}"},
    "old-driver": {"LD_LIBRARY_PATH": "{old}"},
    "one-thread": {"OMP_NUM_THREADS": "1"},
    "oldest-processor": {"WINNOW_CPU_ISA": "baseline"},
}


def compile_driver(folder):
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler for the driver")
    (folder / "driver.c").write_text(OLD_DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_poor_machines_import_and_compute(machine, tmp_path):
    # The loader stops at the first file of a name, even if it is no library, wherever a driver is.
    broken, old = tmp_path / "broken", tmp_path / "old"
    broken.mkdir()
    old.mkdir()
    (broken / "libcuda.so.1").touch()
    if machine == "old-driver":
        compile_driver(old)
    variables = {
        name: value.format(broken=broken, old=old) for name, value in MACHINES[machine].items()
    }
    program = (
        "import ctypes, numpy as np, winnow\n"
        "kv = np.arange(8 * 512, dtype=np.float32).reshape(8, 1, 512)\n"
        "i = np.array([[[3]]], np.int32)\n"
        "out, _, _ = winnow.sparse_mla.forward(np.zeros((1, 1, 512), np.float32), kv, i)\n"
        "assert (out == kv[3]).all()\n"
        "answer = winnow.supports('sparse_mla.forward', device='cuda', dtype='bfloat16')\n"
        "print(bool(answer), answer.reason)\n"
        "for backend in winnow.backends():\n"
        "    assert backend['supported'] or backend['reason']\n"
        "    print(backend['name'], backend['reason'])\n"
        "try:\n"
        "    ctypes.CDLL('libcuda.so.1')\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    result = python("-c", program, add=variables, check=True)
    if machine in ("no-visible-gpu", "no-driver", "old-driver"):
        assert result.stdout.startswith("False sparse_mla::forward: backend: want a backend")
    if machine == "no-driver":
        assert "libcuda.so.1: file too short" in result.stdout
    if machine == "old-driver" and "sm90 this build has no kernels" not in result.stdout:
        needs = "the CUDA driver is one of CUDA 11.2, this build needs one of"
        assert f"sm90 {needs}" in result.stdout


_DAEMONS = """
import gc, sys, tempfile, threading, time
import numpy as np
from winnow import expert_parallel, sparse_mla

q = np.ones((200, 16, 576), np.float32)
kv = np.ones((2000, 1, 576), np.float32)
indices = np.zeros((200, 1, 512), np.int32)
inside = threading.Semaphore(0)

def attend():
    while True:
        inside.release()
        sparse_mla.forward(q, kv, indices)

def wait():
    inside.release()
    store = expert_parallel.FileStore(tempfile.mkdtemp(), job="test")
    expert_parallel.create_shared_memory(store, 0, 2, timeout=2)

class Store:
    def set(self, key, value):
        pass
    def get(self, key):
        pass
    def check(self, keys):
        time.sleep(0.01)
        return False

def ask():
    inside.release()
    expert_parallel.create_shared_memory(Store(), 0, 2, timeout=2)

world = expert_parallel.InProcessWorld(4)

sizes = {"max_tokens": 1, "hidden": 512, "topk": 1}

def make(kind, **sizes):
    transport = world.transport(ranks.pop())
    inside.release()
    kind(transport, world.store(), experts=4, timeout=1, **sizes)

def layer():
    make(expert_parallel.AllToAll, **sizes)

def notifier():
    make(expert_parallel.Notifier)

def low_latency():
    make(expert_parallel.LowLatency, **sizes)

class Late:  # the interpreter is still ending when the waits have ended
    def __init__(self):
        self.cycle = self
    def __del__(self, sleep=time.sleep):
        sleep(2)

ranks = [0, 1, 2]
if sys.argv[1] in ("layer", "notifier", "low_latency"):
    gc.disable()
    Late()
for _ in range(3):
    threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
for _ in range(3):
    inside.acquire()
time.sleep(0.2)
"""


@pytest.mark.parametrize("what", ["attend", "wait", "ask", "layer", "notifier", "low_latency"])
def test_daemon_threads_inside_calls_do_not_abort_the_end_of_a_program(what):
    with ThreadPoolExecutor(3) as started:
        for result in started.map(lambda _: python("-c", _DAEMONS, what, timeout=60), range(3)):
            assert (result.returncode, result.stderr) == (0, "")
