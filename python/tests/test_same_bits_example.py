"""examples/same_bits, as its page says to run it."""

from pathlib import Path

import pytest
import winnow.transformers as dsa
from processes import run_here
from test_transformers import one_thread  # noqa: F401

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "same_bits" / "same_bits.py"


def run(monkeypatch, *arguments):
    return run_here(monkeypatch, PROGRAM, "--device", "cpu", "--new", "6", *arguments)


def lines_of(printed):
    """{(functions, rows of): difference}"""
    cells = [line.rsplit(maxsplit=2) for line in printed.splitlines()[1:-1]]
    return {(functions.strip(), rows): float(worst) for functions, rows, worst in cells}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_have_the_same_bits(dtype, monkeypatch, capsys):
    run(monkeypatch, "--dtype", dtype)
    printed = capsys.readouterr().out
    assert printed.endswith("engine and trainer have the same bits\n")
    differences = lines_of(printed)
    assert differences["row by row", "engine"] == 0
    assert differences["torch's", "engine"] < 1e-4 or dtype == "bfloat16"
    for functions in ("torch's", "row by row"):  # the rows are what most depends on
        assert differences[functions, "trainer"] > 0.01


def test_other_rows_are_noticed(monkeypatch):
    """One row of one token, chosen otherwise than the engine did."""
    right = dsa.replay

    def wrong(model, choices):
        layer, rows = next(iter(choices.rows.items()))
        last = rows[-1]
        last[0] = next(row for row in range(len(rows)) if row not in last)
        return right(model, choices)

    monkeypatch.setattr(dsa, "replay", wrong)
    with pytest.raises(SystemExit, match="same_bits: the last one should be 0"):
        run(monkeypatch, "--batch", "1")
