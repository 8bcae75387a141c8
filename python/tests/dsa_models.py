"""Tiny random models with DeepSeek Sparse Attention, one of each family of transformers.

Their heads have the sizes of real ones (512 and 64 columns of a row, 128 of the indexer); all else
is small. Sequences are longer than what the indexer chooses.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots3NoteForCausalLM,
    Dots3NoteTextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
)
from winnow.transformers import FAMILIES as MODEL_TYPES

from winnow import Error

CACHE = "past_key_values"  # the argument, and its place in what a model returns
if "hy_v4_vl_text" in MODEL_TYPES:  # from transformers 5.24 on
    from transformers import HYV4VLConfig, HYV4VLForConditionalGeneration

    CACHE = "cache"

TOPK = 8
VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "index_topk": TOPK,
    "index_n_heads": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {**_COMMON, "q_lora_rank": 48}
_SHARED = {**_LATENT, "indexer_types": ["full", "shared", "full"]}
_SLIDING = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 48, "kv_lora_rank": 64,
    "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 24,
}  # fmt: skip
_MISTRAL_TEXT = {
    **_COMMON,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "full", "shared", "full"],
    "kv_source_layers": [0, 1, 0, 1],
    "no_rope_layers": [1, 0, 1, 0],
}
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4,
}  # fmt: skip
_MISTRAL_VISION = {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 16}
_HY_VISION = {**_VISION, "max_image_size": 16, "out_hidden_size": 64}
_CONFIGS = {
    "deepseek_v32": lambda **o: DeepseekV32Config(**{**_LATENT, **o}),
    "glm_moe_dsa": lambda **o: GlmMoeDsaConfig(**{**_SHARED, **o}),
    "hy_v4": lambda **o: HYV4Config(**{**_SHARED, **o}),
    "hy_v4_vl": lambda **o: HYV4VLConfig(
        text_config={**_SHARED, **o},
        vision_config=_HY_VISION,
        image_token_id=2,
        pad_token_id=0,
    ),
    "dots3_note": lambda **o: Dots3NoteTextConfig(
        **{
            **_LATENT,
            "head_dim": 96,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": 6,
            "shared_experts_intermediate_size": 32,
            **{f"swa_{name}": size for name, size in _SLIDING.items()},
            **o,
        }
    ),
    "mistral_large4": lambda **o: MistralLarge4Config(
        text_config={"model_type": "mistral_large4_text", **_MISTRAL_TEXT, **o},
        vision_config=_MISTRAL_VISION,
        pad_token_id=0,
    ),
}
_MODELS = {
    "deepseek_v32": DeepseekV32ForCausalLM,
    "glm_moe_dsa": GlmMoeDsaForCausalLM,
    "hy_v4": HYV4ForCausalLM,
    "dots3_note": Dots3NoteForCausalLM,
    "mistral_large4": MistralLarge4ForConditionalGeneration,
}
if "hy_v4_vl_text" in MODEL_TYPES:
    _MODELS["hy_v4_vl"] = HYV4VLForConditionalGeneration
FAMILIES = list(_MODELS)


def make(family, implementation="eager", seed=0, dtype=torch.float32, **options):
    """A model in evaluation mode. What transformers starts at 0 or 1 is random here."""
    torch.manual_seed(seed)
    config = _CONFIGS[family](**options)
    model = _MODELS[family]._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "softmax_scaling" in name or "sinks" in name:
                parameter.normal_(0.5, 0.3)
            if name.endswith("alpha"):  # of rotary frequencies; a buffer before transformers 5.24
                parameter.normal_(0, 0.1)
            if name.endswith("norm.weight") or name.endswith("norm.bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.get_input_embeddings().weight.normal_(0, 1)  # that of padding, too
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # all tokens that are asked for
    return model.to(dtype).eval()


def tokens(batch=2, length=40, seed=1):
    """Sequences in which no token comes twice: keys without positions would tie."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(VOCABULARY - 3, generator=generator) for _ in range(batch)]
    return torch.stack(orders)[:, :length] + 3


class _Ties(TorchDispatchMode):
    """Sees every torch.topk over scores of an indexer: of [batch, queries, rows] it takes TOPK."""

    def __init__(self):
        super().__init__()
        self.calls, self.gap = 0, float("inf")

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        of_indexer = function is torch.ops.aten.topk.default and arguments[1] == TOPK
        if of_indexer and arguments[0].dim() == 3:
            scores, k = arguments[0].double(), TOPK
            self.calls += 1
            if k < scores.shape[-1]:
                best = scores.sort(-1, descending=True).values
                last, next_one = best[..., k - 1], best[..., k]
                hidden = next_one <= torch.finfo(torch.float32).min / 2
                gap = torch.where(hidden, torch.inf, (last - next_one) / best[..., 0].abs())
                self.gap = min(self.gap, float(gap.min()))
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def no_ties():
    """Within, no query of the original indexers has rows that tie at the last place it chooses:
    torch.topk takes any of them."""
    with _Ties() as seen:
        yield
    assert seen.calls > 0
    assert seen.gap > 1e-5


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def near(got, want, times, least=0.0):
    """Gradients by name: each is near to within so many times its largest, or `least`."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        limit = times * max(float(gradient.abs().max()), least)
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=limit, msg=name)


def divergence(scores, target, visible):
    """The mean over queries of KL(target || softmax of scores), both over visible rows alone."""
    target = target.masked_fill(~visible, 0)
    target = target / target.sum(-1, keepdim=True)
    log_p = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
    terms = target * (target.clamp(min=1e-300).log() - log_p)
    return torch.where(target > 0, terms, 0).sum(-1).mean()


def set_topk(model, count):
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = count


def refused(text, call, *arguments, **options):
    """The call raises an error of "winnow" whose text begins like that."""
    with pytest.raises(ValueError, match="transformers: " + text) as caught:
        call(*arguments, **options)
    assert isinstance(caught.value, Error)
    assert caught.value.operation == "transformers" and caught.value.argument
