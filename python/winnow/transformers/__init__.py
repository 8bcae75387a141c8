"""Models of Hugging Face transformers with DeepSeek Sparse Attention, on Winnow.

    import winnow.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="winnow")

The import registers the attention implementation "winnow"; model.set_attn_implementation("winnow")
does as well, and "sdpa" or "eager" restores what was before, bit for bit. Forward, backward,
generate, caches and gradient checkpointing stay as they are, for the families of FAMILIES. Layers
that have no indexer (sliding windows, vision, audio) run exactly as under "sdpa", but those of
DeepSeek-V4 on Winnow, too. A model, an option or a mask that cannot run is an error, when the
implementation is set or at the first call.

It registers the implementation "winnow" of expert parallelism, too:
DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="winnow"), for any mixture of experts.
"""

from winnow.transformers import experts
from winnow.transformers.loss import (
    attend_densely,
    attention_share,
    choose_in_f8,
    indexer_loss,
)
from winnow.transformers.registry import FAMILIES, VERSIONS, register

__all__ = [
    "FAMILIES",
    "VERSIONS",
    "attend_densely",
    "attention_share",
    "choose_in_f8",
    "indexer_loss",
]

register()
experts.register()
