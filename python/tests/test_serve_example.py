"""examples/serve_dsa, as its page says to run it."""

from pathlib import Path

import pytest
from processes import run_here

from winnow import indexer, sparse_mla

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "serve_dsa"


def _run(monkeypatch, *arguments, program="serve.py"):
    monkeypatch.syspath_prepend(FOLDER)
    run_here(monkeypatch, FOLDER / program, "--device", "cpu", *arguments)


@pytest.mark.parametrize("format", ["fp8_656", "fp8_584", "bf16"])
def test_every_step_equals_the_full_computation(format, monkeypatch, capsys):
    _run(monkeypatch, "--format", format)
    output = capsys.readouterr().out
    assert "up to 5 sequences together" in output
    assert output.endswith(
        "every step equals the full computation, to the precision of the cache\n"
    )


@pytest.mark.parametrize("format", ["bf16", "fp8_584"])
def test_v4_gets_the_tokens_of_transformers(format, monkeypatch, capsys):
    pytest.importorskip("transformers.models.deepseek_v4")
    _run(monkeypatch, "--format", format, program="serve_v4.py")
    output = capsys.readouterr().out
    assert "up to 5 sequences together" in output
    assert format == "fp8_584" or output.endswith(
        "6 of 6 requests got the tokens of transformers\n"
    )


def test_a_wrong_choice_is_noticed(monkeypatch):
    right = indexer.topk_paged

    def one_less(q, pages, weights, tables, lengths, topk):
        return right(q, pages, weights, tables, lengths - 1, topk)

    monkeypatch.setattr(indexer, "topk_paged", one_less)
    with pytest.raises(SystemExit, match="serve: it should be at most 0.005"):
        _run(monkeypatch, "--format", "bf16", "--requests", "2", "--steps", "3")


@pytest.mark.parametrize("forgotten", ["window", "rows"])
def test_a_row_that_is_not_stored_is_noticed(forgotten, monkeypatch):
    """Of V4: the token before the new one, or the last compressed row."""
    pytest.importorskip("transformers.models.deepseek_v4")
    right = sparse_mla.decode

    def without(q, cache, indices, **options):
        if forgotten == "window":
            indices[..., 1] = -1
        elif options.get("extra_indices") is not None:
            options["extra_indices"][..., 0] = -1
        return right(q, cache, indices, **options)

    monkeypatch.setattr(sparse_mla, "decode", without)
    with pytest.raises(SystemExit, match="serve: it should be at most 0.02"):
        _run(monkeypatch, "--requests", "2", "--steps", "3", program="serve_v4.py")


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
