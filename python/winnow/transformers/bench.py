"""``python -m winnow bench transformers``: one attention layer of DeepSeek-V3.2 with "winnow" and
with transformers' own "sdpa", forward and in a training step.

On a GPU the layer has its real dimensions, in bfloat16; on the CPU it is small. Peak memory is that
beside the layer's weights and input, the mask included; a call that does not fit is a result. The
targets are those of one H200.
"""

import argparse
import json
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from transformers import DeepseekV32Config
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as original

import winnow.transformers  # noqa: F401 (it registers the implementation)
from winnow.transformers.memory import peak
from winnow.transformers.registry import prepare

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
_TOKENS = {"cpu": (512, 1024), "cuda": (8192, 16384, 32768, 131072)}
# Seconds and bytes at 16,384 tokens on one of these GPUs.
_TARGET_GPU = "NVIDIA H200"
_TARGETS = {"forward": (45e-3, 12 << 30), "training step": (150e-3, 24 << 30)}
_REPETITIONS, _SECONDS = 7, 2.0


class _Layer:
    """One attention layer with random weights, and its rotary embedding."""

    def __init__(self, device: torch.device):
        torch.manual_seed(0)
        self.device = device
        cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.config = DeepseekV32Config(num_hidden_layers=1, **({} if cuda else _SMALL))
        self.attention = original.DeepseekV32Attention(self.config, 0).to(device, self.dtype)
        self.attention.indexer.weights_proj.float()  # as models of transformers have it
        self.rotary = original.DeepseekV32RotaryEmbedding(self.config).to(device)

    def call(self, implementation: str, operation: str, tokens: int) -> Callable[[], None]:
        """What is measured: forward, or with the backward pass."""
        self.config._attn_implementation = implementation
        generator = torch.Generator(self.device).manual_seed(tokens)
        shape = (1, tokens, self.config.hidden_size)
        hidden = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        positions = torch.arange(tokens, device=self.device)[None]
        training = operation == "training step"
        hidden.requires_grad_(training)
        embeddings = self.rotary(hidden, positions)
        self.attention.train(training)
        for parameter in self.attention.indexer.parameters():
            parameter.requires_grad_(False)
        masks: List[Any] = []  # the layers of a model share one

        def run() -> None:
            if not masks:
                masks.append(
                    create_causal_mask(
                        self.config, hidden, None, None, positions, allow_is_causal_skip=False
                    )
                )
            with torch.set_grad_enabled(training):
                out = self.attention(hidden, embeddings, masks[0], position_ids=positions)[0]
                if training:
                    out.backward(hidden.detach())
                    hidden.grad = None
                    self.attention.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return run


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
        "benchmark": f"{implementation}, {operation}, {tokens} tokens",
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
    if implementation != "winnow" or layer.device.type == "cpu":
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


def measure(device: torch.device, tokens: Optional[List[int]] = None) -> Iterator[Dict[str, Any]]:
    """Results of `winnow bench`, with peak_bytes, and error for what does not fit."""
    prepare("deepseek_v32")
    layer = _Layer(device)
    for count in tokens or _TOKENS[device.type]:
        for operation in _TARGETS:
            for implementation in ("winnow", "sdpa"):
                yield _measure(layer, implementation, operation, count)


def _line(row: Dict[str, Any]) -> str:
    if row["error"]:
        text = f"{row['benchmark']:44}{row['error']:>14}"
    else:
        text = (
            f"{row['benchmark']:44}{1e3 * row['seconds']:11.1f} ms"
            f"{row['peak_bytes'] / 2**30:9.2f} GiB"
        )
    if "target_seconds" in row:
        text += f"   target {1e3 * row['target_seconds']:.0f} ms, {row['target_bytes'] >> 30} GiB"
    if "target_gpus" in row:
        text += "   no target for this GPU"
    return text + ("" if "reached" not in row else "  reached" if row["reached"] else "  MISSED")


def main(arguments: List[str]) -> int:
    """Prints the table; 1 if --check is given and a target is missed."""
    description = str(__doc__).replace("``", "")
    parser = argparse.ArgumentParser(prog="winnow bench transformers", description=description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu or cuda; here {default}")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(arguments)
    rows = []
    for row in measure(torch.device(options.device), options.tokens):
        rows.append(row)
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if options.check and not all(row.get("reached", True) for row in rows) else 0
