"""Which versions and models of transformers are known, and how "winnow" comes into them."""

import functools
import importlib
from typing import Dict, Optional

import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from winnow.transformers import compressed, layer, masks, sequences
from winnow.transformers.families import (
    HYV4,
    HYV4VL,
    DeepseekV4,
    DeepseekV32,
    Dots3Note,
    Family,
    MistralLarge4,
)
from winnow.transformers.refusal import refuse

# The models of each version by the model type of their text configuration.
_FAMILIES: Dict[str, Family] = {
    "deepseek_v32": DeepseekV32("deepseek_v32", "DeepseekV32", shares_indices=False),
    "glm_moe_dsa": Family("glm_moe_dsa", "GlmMoeDsa", shares_indices=True),
    "hy_v4": HYV4("hy_v4", "HYV4", shares_indices=True),
    "dots3_note_text": Dots3Note(
        "dots3_note",
        "Dots3NoteText",
        shares_indices=False,
        towers=("dots3_note_vision_encoder", "dots3_note_audio_encoder"),
    ),
    "mistral_large4_text": MistralLarge4(
        "mistral_large4", "MistralLarge4Text", shares_indices=True, towers=("pixtral",)
    ),
}
_HYV4_VL = HYV4VL("hy_v4_vl", "HYV4VL", shares_indices=True, towers=("hy_v4_vl_vision",))
VERSIONS: Dict[str, Dict[str, Family]] = {
    "5.23": _FAMILIES,
    "5.24": {
        **_FAMILIES,
        "hy_v4_vl_text": _HYV4_VL,
        "deepseek_v4": DeepseekV4("deepseek_v4", "DeepseekV4", shares_indices=False),
    },
}

# Sparse attention of other kinds, which Winnow has no operation for.
_UNSUPPORTED = {
    "axk2": "keys of 160 and values of 128 columns",
    "deepseek_v4": "compressed rows beside a sliding window",  # before transformers 5.24
    "glm5_next": "attention that this version of Winnow does not know",
    "minimax_m3_vl": "blocks of keys and values per head",
    "qwen4_exp": "attention that this version of Winnow does not know",
}


def version() -> str:
    """Which of VERSIONS is installed, or an error."""
    installed = ".".join(transformers.__version__.split(".")[:2])
    if installed not in VERSIONS:
        known = " or ".join(f"{v}.x" for v in VERSIONS)
        refuse("transformers.__version__", known, transformers.__version__)
    return installed


def _families() -> Dict[str, Family]:
    return VERSIONS[version()]


FAMILIES = tuple(_families())
"""The model types of the installed version that run on Winnow."""


def family_of(config) -> Optional[Family]:
    """The family of a text configuration, or None."""
    return _families().get(config.model_type)


def _is_tower(config) -> bool:
    return any(config.model_type in family.towers for family in _families().values())


def _check_shapes(config) -> None:
    if isinstance(family_of(config), DeepseekV4):
        _check_compressed(config)
        return
    layers = range(config.num_hidden_layers)
    indexed = [i for i in layers if config.layer_types[i] == "indexed_attention"]
    if not indexed:
        refuse("layer_types", "some of indexed_attention", sorted(set(config.layer_types)))
    if "full_attention" in config.layer_types:
        refuse("layer_types", "indexed_attention for all full layers", "full_attention, too")
    wanted = {
        "kv_lora_rank": (512,),
        "qk_rope_head_dim": (64,),
        "index_head_dim": (128, 64),
        "index_n_heads": range(1, 129),
    }
    for name, possible in wanted.items():
        for i in indexed:
            got = getattr(config.per_layer_config[i], name)
            if got not in possible:
                text = "1 to 128" if name == "index_n_heads" else " or ".join(map(str, possible))
                refuse(name, text, got)
    for i in indexed:
        if config.per_layer_config[i].index_topk < 1:
            refuse("index_topk", "1 or more", config.per_layer_config[i].index_topk)


def _check_compressed(config) -> None:
    """The same for DeepSeek-V4."""
    rates = {f"compress_rates[{kind!r}]": rate for kind, rate in config.compress_rates.items()}
    wanted = {
        "head_dim": (config.head_dim, (512,), "512"),
        "num_key_value_heads": (config.num_key_value_heads, (1,), "1"),
        "index_head_dim": (config.index_head_dim, (128, 64), "128 or 64"),
        "index_n_heads": (config.index_n_heads, range(1, 129), "1 to 128"),
        "index_topk": (config.index_topk, range(1, 1 << 31), "1 or more"),
        "sliding_window": (config.sliding_window, range(1, 1 << 31), "1 or more"),
        "is_causal": (getattr(config, "is_causal", True), (True,), "True"),
        **{name: (rate, range(1, 129), "1 to 128") for name, rate in rates.items()},
    }
    for name, (got, possible, text) in wanted.items():
        if got not in possible:
            refuse(name, text, got)


_prepared = set()  # model types


def prepare(model_type: str) -> None:
    """Puts Winnow into the modules of a family, once."""
    if model_type in _prepared:
        return
    family = _families()[model_type]
    module = importlib.import_module(family.module)
    kinds = [getattr(module, name, None) for name in family.replaced]
    for name, kind in zip(family.replaced, kinds, strict=True):
        if kind is None or kind.forward.__module__ != family.module:
            got = "none" if kind is None else f"one replaced by {kind.forward.__module__}"
            refuse(f"{family.module}.{name}", "the module of transformers, as released", got)
    of_kind = compressed if isinstance(family, DeepseekV4) else layer
    of_kind.replace_forwards(family, *kinds)
    _prepared.add(model_type)


def check(model: PreTrainedModel) -> None:
    """Refuses a model that cannot run on Winnow, and makes ready one that can."""
    config = model.config
    text = config.get_text_config()
    kind = config.model_type.removesuffix("_text").removesuffix("_vision")
    family = family_of(text)
    supported = ", ".join(_families())
    if family is None:
        if _is_tower(config):
            return
        if kind in _UNSUPPORTED:
            refuse("model", supported, f"{kind}, which has {_UNSUPPORTED[kind]}")
        refuse("model", f"one with DeepSeek Sparse Attention ({supported})", config.model_type)
    folder = family.module.rpartition(".")[0]
    if not type(model).__module__.startswith(folder + "."):
        refuse("model", f"a class of {folder}", f"{type(model).__module__}.{type(model).__name__}")
    _check_shapes(text)
    prepare(text.model_type)
    layer.forget_where_it_fails(type(model))


def _checking(choose):
    """PreTrainedModel.get_correct_attn_implementation, which every model asks when it is made and
    when its implementation is set."""

    @functools.wraps(choose)
    def checked(self, *arguments, **options):
        implementation = choose(self, *arguments, **options)
        if implementation == "winnow":
            check(self)
        return implementation

    return checked


def _attention_function(module, *arguments, **options):
    """Attention of the layers that have no indexer."""
    config = module.config
    family = family_of(config)
    if family.has_indexer(module) if family else not _is_tower(config):
        name = f"{type(module).__module__}.{type(module).__name__}"
        refuse("attention module", f"one of {', '.join(_families())}", name)
    return sdpa_attention_forward(module, *arguments, **options)


def _mask_function(*arguments, config=None, **options):
    indexed = config is not None and family_of(config) is not None
    if indexed and config.model_type not in _prepared:  # nothing asked check() for this model
        _check_shapes(config)
        prepare(config.model_type)
    if indexed and isinstance(family_of(config), DeepseekV4):
        return sequences.mask(*arguments, **options)
    return masks.mask(*arguments, config=config, indexed=indexed, **options)


def register() -> None:
    """Makes "winnow" an attention implementation of transformers, or refuses its version."""
    _families()
    ALL_ATTENTION_FUNCTIONS.register("winnow", _attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register("winnow", _mask_function)
    choose = PreTrainedModel.get_correct_attn_implementation
    PreTrainedModel.get_correct_attn_implementation = _checking(choose)
