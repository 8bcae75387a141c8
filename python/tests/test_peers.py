"""tools/compare, on the CPU beside modules that stand in for the other libraries."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from processes import forked, run_here

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "results" / "schema.json"
STAND_INS = Path(__file__).resolve().parent / "peers"


def _compare(*arguments, path):
    return forked(ROOT / "tools" / "compare", *arguments, path=[path])


@pytest.fixture
def compare_here(monkeypatch, capsys):
    """(the status, stdout, stderr) of the same in this process, which has imported torch before."""

    def run(*arguments):
        for peer in ("flash_mla", "cudnn", "deep_gemm", "deep_ep"):  # of other tests
            monkeypatch.delitem(sys.modules, peer, raising=False)
        with pytest.raises(SystemExit) as ended:
            run_here(monkeypatch, ROOT / "tools" / "compare", *arguments)
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_help_names_the_families(compare_here):
    text = " ".join(compare_here("--help")[1].split())
    assert "an operation, or a family: sparse_mla, indexer, expert_parallel" in text


@pytest.mark.parametrize("operation", ["nothing", "sparse_mla::nothing"])
def test_an_unknown_operation_is_named(compare_here, operation):
    status, _, said = compare_here(operation)
    assert status == 2 and "operation: wanted one of " in said


@pytest.mark.parametrize(
    ("operation", "peer", "address"),
    [
        ("sparse_mla::forward", "flash_mla", "https://github.com/deepseek-ai/FlashMLA"),
        ("indexer::backward", "cudnn", "https://github.com/NVIDIA/cudnn-frontend"),
        ("indexer::topk_paged", "deep_gemm", "https://github.com/deepseek-ai/DeepGEMM"),
        ("expert_parallel", "deep_ep", "https://github.com/deepseek-ai/DeepEP"),
    ],
)
def test_a_peer_that_is_not_installed_is_named(compare_here, operation, peer, address):
    said = f"compare: {peer} is not installed, so it is not measured; it comes from {address}\n"
    assert compare_here(operation, "--device", "cpu") == (3, "", said)


@pytest.mark.parametrize(
    ("family", "benchmarks"), [("sparse_mla", 8), ("indexer", 8), ("expert_parallel", 6)]
)
def test_both_sides_are_checked_and_timed(family, benchmarks):
    options = ("--device", "cpu", "--seconds", "0.001", "--repetitions", "3", "--json")
    made = _compare(family, *options, path=STAND_INS)
    assert made.returncode == 0, made.stdout + made.stderr
    report = json.loads(made.stdout)
    assert report["where"] == "CPU" and report["repetitions"] == 3
    record = {**report, "commit": "49db1c0", "command": f"python tools/compare {family}"}
    jsonschema.validate({"records": [record]}, json.loads(SCHEMA.read_text()))
    assert len(report["results"]) == benchmarks
    for result in report["results"]:
        (peer,) = result["peers"]
        assert peer["version"].split(" + ")[0] == "stand-in"
        assert peer["agreement"] >= 0.99
        assert peer["times_as_fast"] == pytest.approx(peer["seconds"] / result["seconds"])
        assert result["seconds"] > 0


def test_a_peer_with_other_results_is_not_timed(tmp_path):
    (tmp_path / "flash_mla.py").write_text(
        "def flash_mla_sparse_fwd(q, kv, indices, sm_scale):\n"
        "    return (-q[..., :512], None, None)\n"
    )
    options = ("--device", "cpu", "--seconds", "0.001", "--repetitions", "1")
    made = _compare("sparse_mla::forward", *options, path=tmp_path)
    assert made.returncode == 1
    assert "flash_mla unknown: its results agree by " in made.stdout
    assert "times as fast" not in made.stdout
