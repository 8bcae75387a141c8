"""Long use, many threads, fork, and machines without a GPU."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import problems
import pytest
import torch

import winnow
from winnow import sparse_mla


def _hash(results):
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result).tobytes())
    return digest.hexdigest()


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


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
    """10,000 calls of random sizes, forward and backward: the same bits, no growth of memory."""
    rng = np.random.default_rng(0)
    shapes = [
        {"seed": i, "s_q": int(rng.integers(0, 3)), "h_q": int(rng.integers(1, 4)),
         "s_kv": int(rng.integers(0, 12)), "topk": int(rng.integers(0, 6)), "d_qk": 512}
        for i in range(40)
    ]  # fmt: skip
    cases = [problems.sparse_mla(**shape)[:3] for shape in shapes]
    as_torch = [[torch.from_numpy(a) for a in case] for case in cases]
    want = [_hash(_call(case)) for case in cases]
    settled = None
    for i in range(10000):
        which = int(rng.integers(len(cases)))
        arguments = (cases, as_torch)[i % 2][which]
        assert _hash(_call(arguments)) == want[which]
        if i == 1000:
            settled = _resident_bytes()
    assert _resident_bytes() <= settled + (8 << 20)


def test_eight_threads(one_thread):
    cases = [problems.sparse_mla(seed=i)[:3] for i in range(8)]
    want = [_hash(_call(case)) for case in cases]
    wrong = []

    def work(which):
        for _ in range(50):
            if _hash(_call(cases[which])) != want[which]:
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


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


MACHINES = {
    "no-visible-gpu": {"CUDA_VISIBLE_DEVICES": ""},
    "no-such-library-path": {"LD_LIBRARY_PATH": "/nowhere"},
    "one-thread": {"OMP_NUM_THREADS": "1"},
    "oldest-processor": {"WINNOW_CPU_ISA": "baseline"},
}


@pytest.mark.parametrize("machine", MACHINES)
def test_poor_machines_import_and_compute(machine):
    program = (
        "import numpy as np, winnow\n"
        "kv = np.arange(8 * 512, dtype=np.float32).reshape(8, 1, 512)\n"
        "i = np.array([[[3]]], np.int32)\n"
        "out, _, _ = winnow.sparse_mla.forward(np.zeros((1, 1, 512), np.float32), kv, i)\n"
        "assert (out == kv[3]).all()\n"
        "answer = winnow.supports('sparse_mla.forward', device='cuda', dtype='bfloat16')\n"
        "print(bool(answer), answer.reason)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **MACHINES[machine]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    if machine == "no-visible-gpu":
        assert result.stdout.startswith("False sparse_mla::forward: backend: want a backend")


def test_an_unknown_processor_module_is_an_error():
    result = subprocess.run(
        [sys.executable, "-c", "import winnow, numpy as np\n"
         "z = np.zeros((1, 1, 512), np.float32)\n"
         "winnow.sparse_mla.forward(z, z, np.zeros((1, 1, 1), np.int32))"],
        env={**os.environ, "WINNOW_CPU_ISA": "abacus"},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 1
    assert "abacus" in result.stderr.splitlines()[-1]
