"""examples/finetune_dsa, as the page says to run it, and `winnow bench transformers`."""

import json
import sys
from pathlib import Path

import pytest
import torch
import winnow.__main__
from processes import ONE_THREAD, forked, run_here
from winnow.transformers import bench as module
from winnow.transformers import bench_ranks

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "finetune_dsa" / "finetune.py"


def test_the_example_learns_and_needs_less_memory():
    steps = {"memory": 768, "dense": 20, "warm-up": 10, "sparse": 4, "every": 10, "batch": 2}
    arguments = [part for name, count in steps.items() for part in (f"--{name}", count)]
    arguments += ["--text", PROGRAM.parents[2] / "LICENSE"]  # which does not change
    arguments = "--device", "cpu", "--check", *arguments
    result = forked(PROGRAM, *arguments, add=ONE_THREAD, check=True)
    assert result.stdout.endswith("both losses fell, and the share of the chosen rows grew\n")
    peaks = {}
    for line in result.stdout.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name in ("winnow", "sdpa"):
            peaks[name] = int(rest.split()[0])
    assert 0 < peaks["winnow"] < 0.7 * peaks["sdpa"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("short.txt", "the text has 10 bytes; it needs more than 128"),
        ("none.txt", ".*No such file"),
        ("", ".*directory"),
    ],
)
def test_a_text_that_is_too_short_or_not_there(tmp_path, monkeypatch, text, said):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(SystemExit, match=f"finetune: {said}"):
        run_here(monkeypatch, PROGRAM, "--device", "cpu", "--text", tmp_path / text)


@pytest.mark.parametrize("option", ["--every", "--dense", "--memory", "--topk"])
def test_numbers_below_one(option, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_here(monkeypatch, PROGRAM, option, 0)
    assert f"argument {option}: want 1 or more, got 0" in capsys.readouterr().err


def _rows(monkeypatch, capsys, *more):
    """What the command has in JSON, of one repetition."""
    monkeypatch.setattr(sys, "argv", ["winnow", "bench", "transformers", "--json", *more])
    monkeypatch.setattr(module, "_REPETITIONS", 1)
    with pytest.raises(SystemExit) as end:
        winnow.__main__.main()
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tokens", "-1"), "argument --tokens: want 1 or more, got -1"),
        (("--tokens", "160", "0"), "argument --tokens: want 1 or more, got 0"),
        (("--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
        (("--device", "meta"), "argument --device: invalid choice: 'meta'"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(options, text, capsys):
    for main in (module.main, bench_ranks.main):
        with pytest.raises(SystemExit) as end:
            main(list(options))
        assert end.value.code == 2 and text in capsys.readouterr().err


def test_bench_shows_time_and_memory_of_both(monkeypatch, capsys):
    rows = _rows(monkeypatch, capsys, "--device", "cpu", "--tokens", "160", "192")
    assert [row["benchmark"] for row in rows] == [
        f"{implementation}, {operation}, {tokens} tokens"
        for tokens in (160, 192)
        for operation in ("forward", "training step")
        for implementation in ("winnow", "sdpa")
    ]
    assert all(row["seconds"] > 0 and row["peak_bytes"] >= 0 and not row["error"] for row in rows)


def test_bench_of_each_kind_of_layer_of_deepseek_v4(monkeypatch, capsys):
    options = "--device", "cpu", "--tokens", "160", "--family", "deepseek_v4"
    rows = _rows(monkeypatch, capsys, *options)
    assert [row["benchmark"] for row in rows] == [
        f"{implementation}, {kind} training step, 160 tokens"
        for kind in ("sliding", "CSA", "HCA")
        for implementation in ("winnow", "eager")
    ]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert not ours["error"] and not theirs["error"] and theirs["peak_bytes"] > 0
        assert theirs["winnow_times_as_fast"] == theirs["seconds"] / ours["seconds"]
        assert theirs["winnow_share_of_memory"] == ours["peak_bytes"] / theirs["peak_bytes"]
        times, share = theirs["winnow_times_as_fast"], theirs["winnow_share_of_memory"]
        end = f"winnow {times:.2f} times as fast, {share:.2f} of the memory"
        assert module._line(theirs).endswith(end)


@pytest.mark.parametrize("kind", ["sliding", "CSA", "HCA"])
def test_layers_of_deepseek_v4_are_on_both_implementations(kind):
    """With "winnow" and "eager" what is measured has the same gradients."""
    found = []
    for implementation in ("winnow", "eager"):
        layer = module._V4Layer(torch.device("cpu"), kind)
        layer.attention.zero_grad = lambda **_: None
        module.prepare(layer.family)
        layer.call(implementation, "training step", 300)()
        trained = layer.attention.named_parameters()
        found.append({name: p.grad for name, p in trained if "indexer" not in name})
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_layer_that_does_not_fit_is_a_result(monkeypatch, capsys):
    def call(self, implementation, operation, tokens):
        def run():
            if implementation == "sdpa":
                raise torch.OutOfMemoryError("no room")

        return run

    monkeypatch.setattr(module._Layer, "call", call)
    assert module.main(["--device", "cpu", "--tokens", "64", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and [line.endswith("out of memory") for line in lines] == [0, 1, 0, 1]
    monkeypatch.setattr(module._V4Layer, "beside", "sdpa")  # which call() has no room for
    assert module.main(["--device", "cpu", "--tokens", "64", "--family", "deepseek_v4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("out of memory") for line in lines] == [0, 1] * 3
    # The targets, as they are judged on a GPU.
    layer = module._Layer(torch.device("cpu"))
    layer.device = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for peak, seconds, reached in ((13 << 30, 0.04, False), (1, 0.05, False), (1, 0.04, True)):
        monkeypatch.setattr(module, "peak", lambda run, device, peak=peak: (None, peak))
        monkeypatch.setattr(module, "_seconds", lambda run, seconds=seconds: seconds)
        row = module._measure(layer, "winnow", "forward", 16384)
        assert row["reached"] is reached
        assert module._line(row).endswith("reached" if reached else "MISSED")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for tokens, told in ((16384, True), (32768, False), (131072, True)):
        row = module._measure(layer, "winnow", "forward", tokens)
        assert "reached" not in row and "target_seconds" not in row
        assert module._line(row).endswith("no target for this GPU") is told
