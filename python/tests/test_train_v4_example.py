"""examples/train_v4, as its page says to run it."""

import re
from pathlib import Path

import pytest
from processes import run_here

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "train_v4" / "train.py"


def _run(monkeypatch, *arguments):
    return run_here(monkeypatch, PROGRAM, "--device", "cpu", *arguments)


def test_the_example_learns_to_recall(monkeypatch, capsys):
    """One note, which a few steps teach; in the sequence it is far outside of the windows."""
    # The layers of ratio 128 have one complete row.
    counts = {"notes": 1, "length": 136, "topk": 14, "dense": 20, "warm-up": 6, "sparse": 4}
    arguments = [part for name, count in counts.items() for part in (f"--{name}", count)]
    _run(monkeypatch, "--check", *arguments)
    printed = capsys.readouterr().out
    assert printed.endswith("both losses fell\n")
    assert re.search(r"^[0-8] of 8 generated answers are right$", printed, re.MULTILINE)
    line = re.compile(r"^sparse +\d+ +([\d.]+) +\d+ % +[\d.]+ +([\d.]+) %$", re.MULTILINE)
    last = line.findall(printed)[-1]
    assert float(last[0]) < 1.2, printed  # who guesses has log(5) = 1.61
    assert 60 < float(last[1]) <= 100, printed  # 14 rows of up to 34


def test_a_loss_that_does_not_fall_is_an_error(monkeypatch):
    one_step = ["--dense", "1", "--warm-up", "1", "--sparse", "1"]
    with pytest.raises(SystemExit, match="train: the loss.* did not fall: "):
        _run(monkeypatch, "--length", "48", "--batch", "1", *one_step, "--check")


def test_arguments_that_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2 notes and their questions need 32 tokens, got 31"):
        _run(monkeypatch, "--notes", "2", "--length", "31")
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--dense", "0")
    assert "argument --dense: want 1 or more, got 0" in capsys.readouterr().err
