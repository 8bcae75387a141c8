"""Tiny random models of DeepSeek-V4. Rows, the indexer's keys and the ratios have the sizes of real
ones; all else is small."""

import torch
from dsa_models import TOPK
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCABULARY = 340
# The first layers and the order of the others; in "short" many windows are open or complete.
PATTERNS = {
    "flash": {"compress_ratios": [0, 0, 4, 128, 4]},
    "pro": {"compress_ratios": [128, 128, 4, 128, 4]},
    "short": {
        "compress_ratios": [4, 128, 0],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 24},
        "sliding_window": 16,
    },
}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "index_n_heads": 32,
    "index_topk": TOPK,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def make(pattern, implementation="eager", seed=0, **options):
    """A model in evaluation mode. What transformers starts at 0 or 1 is random here."""
    torch.manual_seed(seed)
    given = {**_COMMON, **PATTERNS[pattern], "rope_parameters": dict(_YARN), **options}
    config = DeepseekV4Config(**given, num_hidden_layers=len(given["compress_ratios"]))
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "position_bias" in name:
                parameter.normal_(0.5, 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(0, config.n_routed_experts)
        model.get_input_embeddings().weight.normal_(0, 1)  # that of padding, too
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # all tokens that are asked for
    return model.eval()


def tokens(batch=2, length=300, seed=15):
    """Sequences in which no token comes twice; with this seed no rows nearly tie for a choice."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(VOCABULARY - 3, generator=generator) for _ in range(batch)]
    return torch.stack(orders)[:, :length] + 3
