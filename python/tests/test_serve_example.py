"""examples/serve_dsa, as its page says to run it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from winnow import indexer

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "serve_dsa" / "serve.py"


@pytest.mark.parametrize("format", ["fp8_656", "fp8_584", "bf16"])
def test_every_step_equals_the_full_computation(format):
    one = {"OMP_NUM_THREADS": "1", "WINNOW_NUM_THREADS": "1"}  # quicker for problems this small
    result = subprocess.run(
        [sys.executable, PROGRAM, "--device", "cpu", "--format", format],
        capture_output=True, text=True, env={**os.environ, **one},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "up to 5 sequences together" in result.stdout
    assert result.stdout.endswith(
        "every step equals the full computation, to the precision of the cache\n"
    )


def _run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--device", "cpu", *arguments])
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_a_wrong_choice_is_noticed(monkeypatch):
    right = indexer.topk_paged

    def one_less(q, pages, weights, tables, lengths, topk):
        return right(q, pages, weights, tables, lengths - 1, topk)

    monkeypatch.setattr(indexer, "topk_paged", one_less)
    with pytest.raises(SystemExit, match="serve: it should be at most 0.005"):
        _run(monkeypatch, "--format", "bf16", "--requests", "2", "--steps", "3")


def test_a_cache_that_is_too_small(monkeypatch):
    with pytest.raises(SystemExit, match="serve: a prompt of .* tokens needs more than 1 pages"):
        _run(monkeypatch, "--pages", "1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests", "0"),
        ("--prompt", "-1"),
        ("--steps", "0"),
        ("--topk", "x"),
        ("--device", "tpu"),
    ],
)
def test_arguments_that_say_nothing(arguments, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err
