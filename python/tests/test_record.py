"""The log and the records of calls: every argument is in them, and calls from Python are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELDS = sorted((ROOT / "winnow").rglob("*_fields.h"))
LOGGED = sorted((ROOT / "winnow").rglob("*_logged.h"))


def test_every_operation_has_its_fields():
    structs = {
        path for path in (ROOT / "winnow").rglob("*.h")
        if re.search(r"^WINNOW_EXPORT Backend \w+\(const \w+Args& args", path.read_text(), re.M)
    }  # fmt: skip
    assert {path.with_name(path.stem + "_fields.h") for path in structs} == set(FIELDS)


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: path.stem)
def test_each_argument_is_visited_in_order(path):
    visited = re.findall(r'visit\("(\w+)", args\.(\w+)\);', path.read_text())
    assert all(name == member for name, member in visited)
    header = path.with_name(path.name.replace("_fields", "")).read_text()
    body = re.sub(r"//[^\n]*", "", re.search(r"struct \w+Args \{(.*?)\n\};", header, re.S)[1])
    members = [
        re.search(r"(\w+)$", re.sub(r"\s*=.*|\{\}$", "", " ".join(member.split())))[1]
        for member in body.split(";") if member.strip()
    ]  # fmt: skip
    assert [name for name, _ in visited] == members


_NOT_LOGGED = {"allocate", "refusal", "stream", "queues"}


def _members(body):
    body = re.sub(r"//[^\n]*", "", body)
    found = re.findall(r"^  [\w:<>, ()]+?(\w+)(?: = [^;]*|\{[^;]*\});$", body, re.MULTILINE)
    return [name for name in found if name not in _NOT_LOGGED]


@pytest.mark.parametrize("path", LOGGED, ids=lambda path: path.stem)
def test_the_log_of_all_ranks_has_every_argument(path):
    header = path.with_name(path.name.replace("_logged", "")).read_text()
    structs = dict(re.findall(r"struct (\w+Args) \{(.*?)\n\};", header, re.S))
    visitors = dict(re.findall(r"\(const (\w+)& args.*?\{\n(.*?)\n\}", path.read_text(), re.S))
    assert visitors.keys() == structs.keys()
    for name, body in visitors.items():
        visited = re.findall(r'visit\("(\w+)", args\.(\w+)', body)
        assert all(word == member for word, member in visited)
        assert sorted(word for word, _ in visited) == sorted(_members(structs[name])), name


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
    result = subprocess.run(
        [sys.executable, "-c", _CALLS],
        env={"PATH": "/usr/bin:/bin", "WINNOW_LOG": str(log), "WINNOW_RECORD": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    called, refused = log.read_text().splitlines()
    assert "q=f32[1,4,576]/[2304,576,1]" in called and " scale=0.5 " in called
    assert re.search(r" on cpu: cpu, [0-9.]+ (us|ms), recorded in ", called)
    assert " on cpu: error: sparse_mla::forward: q: want " in refused
    good, bad = sorted(tmp_path.glob("*-sparse_mla.forward.call"))
    for file, words in ((good, "the same bits"), (bad, "as it did then")):
        replayed = subprocess.run(
            [sys.executable, "-m", "winnow", "replay", file], capture_output=True, text=True
        )
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert words in replayed.stdout
