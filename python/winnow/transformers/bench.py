"""``python -m winnow bench transformers``: one attention layer of DeepSeek-V3.2 with "winnow" and
with transformers' own "sdpa", forward and in a training step; or with ``--family deepseek_v4``
one layer of each kind of DeepSeek-V4-Flash, beside transformers' "eager", in a training step.

On a GPU the layer has its real dimensions, in bfloat16; on the CPU it is small. Peak memory is that
beside the layer's weights and input, the mask included; a call that does not fit is a result. The
targets are those of one H200, for DeepSeek-V3.2.
"""

import argparse
import json
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from transformers import DeepseekV32Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as original

import winnow.transformers  # noqa: F401 (it registers the implementation)
from winnow.transformers.memory import peak
from winnow.transformers.refusal import refuse
from winnow.transformers.registry import prepare, version

_SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 32,
    "index_topk": 128,
}
_SMALL_V4 = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 32,
    "index_topk": 128,
}
# Seconds and bytes at 16,384 tokens on one of these GPUs.
_TARGET_GPU = "NVIDIA H200"
_TARGETS = {"forward": (45e-3, 12 << 30), "training step": (150e-3, 24 << 30)}
_REPETITIONS, _SECONDS = 7, 2.0


class _Layer:
    """One attention layer with random weights, and its rotary embedding."""

    family = "deepseek_v32"
    beside = "sdpa"
    kind = ""  # before the name of the operation
    operations: Tuple[str, ...] = tuple(_TARGETS)
    tokens: Dict[str, Tuple[int, ...]] = {"cpu": (512, 1024), "cuda": (8192, 16384, 32768, 131072)}

    def __init__(self, device: torch.device):
        torch.manual_seed(0)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.make(device.type == "cuda")

    def make(self, real: bool) -> None:
        """The modules, with real dimensions or small ones."""
        self.config = DeepseekV32Config(num_hidden_layers=1, **({} if real else _SMALL))
        attention = original.DeepseekV32Attention(self.config, 0).to(self.device, self.dtype)
        attention.indexer.weights_proj.float()  # as models of transformers have it
        self.attention, self.indexer = attention, attention.indexer
        self.rotary = original.DeepseekV32RotaryEmbedding(self.config).to(self.device)

    def embeddings(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.rotary(hidden, positions)

    def positions(self, tokens: int) -> torch.Tensor:
        """Of the tokens that this process has, [1, n]."""
        return torch.arange(tokens, device=self.device)[None]

    def mask(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return create_causal_mask(
            self.config, hidden, None, None, positions, allow_is_causal_skip=False
        )

    def call(self, implementation: str, operation: str, tokens: int) -> Callable[[], None]:
        """What is measured: forward, or with the backward pass."""
        self.config._attn_implementation = implementation
        generator = torch.Generator(self.device).manual_seed(tokens)
        positions = self.positions(tokens)
        shape = (*positions.shape, self.config.hidden_size)
        hidden = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        training = operation == "training step"
        hidden.requires_grad_(training)
        embeddings = self.embeddings(hidden, positions)
        self.attention.train(training)
        if self.indexer is not None:
            self.indexer.requires_grad_(False)
        masks: List[Any] = []  # the layers of a model share one

        def run() -> None:
            if not masks:
                masks.append(self.mask(hidden, positions))
            with torch.set_grad_enabled(training):
                out = self.attention(
                    hidden, embeddings, attention_mask=masks[0], position_ids=positions
                )[0]
                if training:
                    out.backward(hidden.detach())
                    hidden.grad = None
                    self.attention.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return run


class _V4Layer(_Layer):
    """One of DeepSeek-V4-Flash, whose dimensions are the defaults of its configuration."""

    family = "deepseek_v4"
    beside = "eager"
    operations = ("training step",)
    # The shortest for the sake of "eager", which forms the scores of all pairs.
    tokens = {"cpu": (512, 1024), "cuda": (4096, 8192, 16384, 131072)}
    ratios = {"sliding": 0, "CSA": 4, "HCA": 128}

    def __init__(self, device: torch.device, kind: str):
        self.kind = f"{kind} "
        self.ratio = self.ratios[kind]
        super().__init__(device)

    def make(self, real: bool) -> None:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        self.config = DeepseekV4Config(
            num_hidden_layers=1, compress_ratios=[self.ratio], vocab_size=8,
            n_routed_experts=1, num_experts_per_tok=1, moe_intermediate_size=8,
            **({} if real else _SMALL_V4),
        )  # fmt: skip
        # A model, since it keeps some of the weights in float32.
        model = DeepseekV4ForCausalLM._from_config(self.config, dtype=self.dtype).to(self.device)
        self.attention = model.model.layers[0].self_attn
        self.indexer = getattr(self.attention.compressor, "indexer", None)
        self.rotary = model.model.rotary_emb

    def embeddings(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return {kind: self.rotary(hidden, positions, kind) for kind in ("main", "compress")}

    def mask(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return create_sliding_window_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=None, cache=None,
            position_ids=positions,
        )  # fmt: skip


_FAMILIES = (_Layer.family, _V4Layer.family)


def _layers(family: str, device: torch.device) -> Iterator[_Layer]:
    if family == _Layer.family:
        yield _Layer(device)
        return
    if version() == "5.23":
        refuse("transformers.__version__", "5.24.x for deepseek_v4", "5.23")
    for kind in _V4Layer.ratios:
        yield _V4Layer(device, kind)


def _seconds(run: Callable[[], None]) -> float:
    """The median of some calls; of one, where that takes long."""
    times: List[float] = []
    while len(times) < _REPETITIONS and sum(times) < _SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _measure(layer: _Layer, implementation: str, operation: str, tokens: int) -> Dict[str, Any]:
    row: Dict[str, Any] = {
        "operation": "transformers",
        "benchmark": f"{implementation}, {layer.kind}{operation}, {tokens} tokens",
        "device": layer.device.type,
        "seconds": None,
        "peak_bytes": None,
        "error": "",
    }
    try:
        run = layer.call(implementation, operation, tokens)
        _, row["peak_bytes"] = peak(run, layer.device)
        row["seconds"] = _seconds(run)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    if layer.device.type == "cuda":
        torch.cuda.empty_cache()
    if implementation != "winnow" or layer.device.type == "cpu" or layer.family != _Layer.family:
        return row
    if torch.cuda.get_device_name(layer.device) != _TARGET_GPU:
        if tokens in (16384, 131072):
            row["target_gpus"] = [_TARGET_GPU]
    elif tokens == 16384:
        row["target_seconds"], row["target_bytes"] = _TARGETS[operation]
        fits = not row["error"] and row["peak_bytes"] <= row["target_bytes"]
        row["reached"] = fits and row["seconds"] <= row["target_seconds"]
    elif tokens == 131072:
        row["reached"] = not row["error"]
    return row


def measure(
    device: torch.device, tokens: Optional[List[int]] = None, family: str = _Layer.family
) -> Iterator[Dict[str, Any]]:
    """Results of `winnow bench`, with peak_bytes, and error for what does not fit. That of
    transformers' own implementation has the ratios to the one before it."""
    for layer in _layers(family, device):
        prepare(family)
        for count in tokens or layer.tokens[device.type]:
            for operation in layer.operations:
                yield (ours := _measure(layer, "winnow", operation, count))
                theirs = _measure(layer, layer.beside, operation, count)
                if not (ours["error"] or theirs["error"]):
                    theirs["winnow_times_as_fast"] = theirs["seconds"] / ours["seconds"]
                    share = ours["peak_bytes"] / max(theirs["peak_bytes"], 1)
                    theirs["winnow_share_of_memory"] = share
                yield theirs


def _line(row: Dict[str, Any]) -> str:
    if row["error"]:
        text = f"{row['benchmark']:44}{row['error']:>14}"
    else:
        text = (
            f"{row['benchmark']:44}{1e3 * row['seconds']:11.1f} ms"
            f"{row['peak_bytes'] / 2**30:9.2f} GiB"
        )
    if "winnow_times_as_fast" in row:
        text += f"   winnow {row['winnow_times_as_fast']:.2f} times as fast"
        text += f", {row['winnow_share_of_memory']:.2f} of the memory"
    if "target_seconds" in row:
        text += f"   target {1e3 * row['target_seconds']:.0f} ms, {row['target_bytes'] >> 30} GiB"
    if "target_gpus" in row:
        text += "   no target for this GPU"
    return text + ("" if "reached" not in row else "  reached" if row["reached"] else "  MISSED")


def _tokens(text: str) -> int:
    tokens = int(text)
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, got {tokens}")
    return tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both benchmarks of layers."""
    known = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    default = known[-1]
    parser.add_argument(
        "--device", choices=known, default=default, help=f"cpu or cuda; here {default}"
    )
    parser.add_argument("--tokens", type=_tokens, nargs="+", help="lengths of the sequence")


def main(arguments: List[str]) -> int:
    """Prints the table; 1 if --check is given and a target is missed."""
    description = str(__doc__).replace("``", "")
    parser = argparse.ArgumentParser(prog="winnow bench transformers", description=description)
    add_arguments(parser)
    parser.add_argument(
        "--family", choices=_FAMILIES, default=_FAMILIES[0], help=f"default: {_FAMILIES[0]}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(arguments)
    rows = []
    for row in measure(torch.device(options.device), options.tokens, options.family):
        rows.append(row)
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if options.check and not all(row.get("reached", True) for row in rows) else 0
