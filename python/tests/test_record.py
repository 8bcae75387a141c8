"""The log and the records of calls: those from Python are in them."""

import re

from processes import python

_CALLS = """
import numpy as np
import winnow

kv = np.ones((8, 1, 1152), np.float32)[:, :, ::2]
kv = np.ascontiguousarray(kv)
rows = np.array([[[1, 2, 3]]], np.int32)
winnow.sparse_mla.forward(np.ones((1, 4, 576), np.float32), kv, rows, scale=0.5)
try:
    winnow.sparse_mla.forward(np.ones((1, 4, 500), np.float32), kv, rows)
except ValueError:
    pass
assert winnow.supports("sparse_mla.forward")  # is no call
"""


def test_calls_from_python_are_logged_and_recorded(tmp_path):
    log = tmp_path / "log"
    environment = {"PATH": "/usr/bin:/bin", "WINNOW_LOG": str(log), "WINNOW_RECORD": str(tmp_path)}
    python("-c", _CALLS, env=environment, check=True)
    called, refused = log.read_text().splitlines()
    assert "q=f32[1,4,576]/[2304,576,1]" in called and " scale=0.5 " in called
    assert re.search(r" on cpu: cpu, [0-9.]+ (us|ms), recorded in ", called)
    assert " on cpu: error: sparse_mla::forward: q: want " in refused
    good, bad = sorted(tmp_path.glob("*-sparse_mla.forward.call"))
    for file, words in ((good, "the same bits"), (bad, "as it did then")):
        replayed = python("-m", "winnow", "replay", file, check=True)
        assert words in replayed.stdout


_TOGETHER = """
import numpy as np
from winnow.expert_parallel import AllToAll, InProcessWorld

x, i = np.ones((8, 16), np.float32), np.zeros((8, 3), np.int32)
world = InProcessWorld(1)
sizes = {"max_tokens": 8, "hidden": 16, "topk": 3, "experts": 8, "dtype": "float32"}
with AllToAll(world.transport(0), world.store(), **sizes) as layer:
    got = layer.dispatch(x, i)
    layer.combine(got.output, got.descriptor)
    layer.barrier()
    try:
        layer.dispatch(x[:, :4], i)
    except ValueError:
        pass
"""


def test_calls_of_all_ranks_are_logged_and_not_recorded(tmp_path):
    asked = {"WINNOW_LOG": str(tmp_path / "log"), "WINNOW_RECORD": str(tmp_path)}
    python("-c", _TOGETHER, add=asked, check=True)
    dispatch, combine, barrier, refused = (tmp_path / "log").read_text().splitlines()
    assert (
        "expert_parallel::dispatch rank=0 input=f32[8,16]/[16,1] expert_indices=i32[8," in dispatch
    )
    assert "expert_parallel::combine rank=0 expert_output=f32[24,16]" in combine
    assert re.search(r"::barrier rank=0 intra_node_only=0 on cpu: cpu, [0-9.]+ (us|ms)$", barrier)
    assert " on cpu: error: expert_parallel::dispatch: rank 0: input: want shape" in refused
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
