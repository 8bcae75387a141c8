"""Models of Hugging Face transformers with DeepSeek Sparse Attention, on Winnow.

    import winnow.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="winnow")

The import registers the attention implementation "winnow". A model that is there already takes it
by model.set_attn_implementation("winnow"), and "sdpa" or "eager" switches back, bit for bit.
Forward, backward, generate, caches and gradient checkpointing stay as they are, for the families of
FAMILIES. Layers that have no indexer (sliding windows, vision, audio) run exactly as under "sdpa";
only in DeepSeek-V4 do they run on Winnow as well. A model, an option or a mask that cannot run is
an error, when the implementation is set or at the first call.

The import also registers the implementation "winnow" of expert parallelism:
DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="winnow"), for any mixture of experts.
"""

from winnow.transformers import experts
from winnow.transformers.choices import Choices
from winnow.transformers.choosing import record, replay
from winnow.transformers.context_parallel import enable_context_parallel
from winnow.transformers.loss import attend_densely, attention_share, choose_in_f8, indexer_loss
from winnow.transformers.registry import FAMILIES, VERSIONS, register

__all__ = [
    "Choices",
    "FAMILIES",
    "VERSIONS",
    "attend_densely",
    "attention_share",
    "choose_in_f8",
    "enable_context_parallel",
    "indexer_loss",
    "record",
    "replay",
]

register()
experts.register()
