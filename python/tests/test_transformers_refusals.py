"""What "winnow" refuses, by name: when it is set, when a model is made, or at the first call."""

import importlib

import pytest
import torch
import winnow.transformers
from dsa_models import FAMILIES, make, refused, tokens
from test_transformers_adapters import adapted
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from winnow.transformers import registry

import winnow


def _llama():
    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip


def test_models_without_sparse_attention():
    text = r"model: want one with DeepSeek Sparse Attention \(deepseek_v32, .*\), got llama"
    refused(text, LlamaForCausalLM._from_config, _llama(), attn_implementation="winnow")
    model = LlamaForCausalLM(_llama())
    refused(text, model.set_attn_implementation, "winnow")
    assert model.config._attn_implementation != "winnow"
    # Where it comes in behind transformers' back, the first call refuses.
    model.config._attn_implementation = "winnow"
    refused("attention module: want .*, got .*LlamaAttention", model, tokens(1, 4) % 32)


def test_what_is_no_model():
    functions = (
        winnow.transformers.attend_densely,
        winnow.transformers.attention_share,
        winnow.transformers.choose_in_f8,
        winnow.transformers.indexer_loss,
    )
    for function in functions:
        for wrong, name in ((None, "NoneType"), ("a name", "str"), (LlamaForCausalLM, "type")):
            refused(f"model: want a module of torch, got {name}", function, wrong)


@pytest.mark.parametrize("kind", ["axk2", "glm5_next", "qwen4_exp", "minimax_m3_vl"])
def test_sparse_attention_of_other_kinds(kind):
    class Model:
        config = AutoConfig.for_model(kind)

    refused(f"model: want deepseek_v32, .*, got {kind}, which has", registry.check, Model())


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_and_back(family, tmp_path):
    """A model that was saved runs on Winnow from the start, and "winnow" is not saved."""
    model = make(family)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="winnow")
    again.save_pretrained(tmp_path)
    text = again.config.get_text_config()
    assert text._attn_implementation == "winnow"
    model.set_attn_implementation("winnow")
    ids = tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != "winnow"


def test_shapes_that_no_operation_has():
    for name, value, wanted in (
        ("kv_lora_rank", 256, "512"),
        ("qk_rope_head_dim", 32, "64"),
        ("index_head_dim", 96, "128 or 64"),
        ("index_n_heads", 129, "1 to 128"),
        ("index_topk", 0, "1 or more"),
    ):
        options = {name: value}
        refused(f"{name}: want {wanted}, got {value}", make, "glm_moe_dsa", "winnow", **options)
        model = make("glm_moe_dsa", **options)
        refused(f"{name}: want {wanted}, got {value}", model.set_attn_implementation, "winnow")
    types = ["full_attention", "sliding_attention", "full_attention"]
    refused(
        "layer_types: want some of indexed_attention",
        make, "dots3_note", "winnow", layer_types=types, use_dsa=False,
    )  # fmt: skip


def test_a_model_class_that_is_not_of_transformers():
    original = type(make("deepseek_v32"))
    kind = type("OwnModel", (original,), {"__module__": "own_models"})
    config = make("deepseek_v32").config
    text = "model: want a class of transformers.models.deepseek_v32, got own_models.OwnModel"
    refused(text, kind._from_config, config, attn_implementation="winnow")


def test_a_module_that_something_else_has_replaced(monkeypatch):
    family = registry.VERSIONS[registry.version()]["deepseek_v32"]
    module = importlib.import_module(family.module)
    monkeypatch.setattr(registry, "_prepared", set())
    monkeypatch.setattr(module.DeepseekV32Indexer, "forward", lambda self, *a, **o: None)
    text = "DeepseekV32Indexer: want the module of transformers, as released, got one replaced by"
    refused(f".*{text} {__name__}", registry.prepare, "deepseek_v32")
    monkeypatch.delattr(module, "DeepseekV32Attention")
    refused(".*DeepseekV32Attention: want .*, got none", registry.prepare, "deepseek_v32")


def test_other_versions_of_transformers(monkeypatch):
    for other in ("5.22.3", "5.25.0", "6.23.0"):
        monkeypatch.setattr(registry.transformers, "__version__", other)
        refused(f"transformers.__version__: want 5.23.x or 5.24.x, got {other}", registry.register)
    for known in ("5.23", "5.24"):
        monkeypatch.setattr(registry.transformers, "__version__", known + ".4")
        assert registry._families() is registry.VERSIONS[known]


def test_a_configuration_that_is_changed_behind_the_model(monkeypatch):
    """Before any model of its family was made for "winnow"."""
    ids = tokens()
    model = make("glm_moe_dsa", "winnow")
    with torch.no_grad():
        want = model(ids).logits
        module = importlib.import_module(
            registry.VERSIONS[registry.version()]["glm_moe_dsa"].module
        )
        for kind in (module.GlmMoeDsaAttention, module.GlmMoeDsaIndexer):
            monkeypatch.setattr(kind, "forward", kind.forward.__wrapped__)
        monkeypatch.setattr(registry, "_prepared", set())
        model = make("glm_moe_dsa")
        model.config._attn_implementation = "winnow"
        assert torch.equal(model(ids).logits, want)


@pytest.fixture(scope="module")
def model():
    return make("glm_moe_dsa", "winnow")


def test_dropout_of_attention_weights():
    model = make("glm_moe_dsa", "winnow", attention_dropout=0.1)
    model(tokens())
    model.train()
    refused("attention_dropout: want 0 in training, got 0.1", model, tokens())


def test_attention_weights(model):
    refused("output_attentions: want False", model, tokens(), output_attentions=True)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_caches_of_other_kinds(model, name):
    """Such as that of continuous batching, which keeps rows in pages."""
    attention = model.model.layers[0].self_attn
    text = "cache: want a Cache of transformers, as generate.* makes it, got dict"
    refused(text, attention, torch.zeros(1, 4, 64), None, None, **{name: {}})


def test_masks_that_are_no_ranges(model):
    ids = tokens()
    gaps = torch.ones_like(ids)
    gaps[1, 7] = 0
    refused("attention_mask: want for every query one range", model, ids, attention_mask=gaps)
    causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril().expand(2, 1, 40, 40).clone()
    model(ids, attention_mask=causal)
    causal[0, 0, 20, 3] = False
    refused("attention_mask: want .*, got a mask with gaps", model, ids, attention_mask=causal)
    bias = torch.zeros(2, 1, 40, 40).masked_fill(~causal, torch.finfo(torch.float32).min)
    bias[1, 0, 9, 2] = 0.5
    refused("attention_mask: want 0 and the smallest", model, ids, attention_mask=bias)
    heads = causal.expand(2, 2, 40, 40)
    refused(r"attention_mask: want shape \[batch, 1,", model, ids, attention_mask=heads)
    short = torch.ones(2, 1, 39, 40, dtype=torch.bool).tril()
    refused(r"attention_mask: want .* = \[2, 1, 40, 40\]", model, ids, attention_mask=short)
    # Fewer rows than there are keys would be taken for the first of them.
    narrow = causal[..., 1:]
    refused(r"attention_mask: want .*, got \[2, 1, 40, 39\]", model, ids, attention_mask=narrow)
    refused("attention_mask: want dtype bool", model, ids, attention_mask=causal.int())
    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    refused("cu_seq_lens_q: want a batch of 1", model, ids, cu_seq_lens_q=starts)


def test_masks_that_are_no_tensors_of_that_shape(model):
    ids = tokens()
    ones = torch.ones_like(ids)
    for wrong in (ones[0], ones[:, :, None], torch.cat((ones, ones)), torch.tensor(1)):
        refused(r"attention_mask: want shape \[batch", model, ids, attention_mask=wrong)
    one, starts = ids[:1], torch.tensor([0, 15, 40])
    model(one, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    refused("cu_seq_lens_q: want a dense", model, one, cu_seq_lens_q=[0, 40])
    for wrong in (starts.float(), starts[None], starts[:1]):
        refused("cu_seq_lens_q: want int32", model, one, cu_seq_lens_q=wrong)
    refused("cu_seq_lens_k: want", model, one, cu_seq_lens_q=starts, cu_seq_lens_k=starts[:2])


def test_modes_that_are_neither_true_nor_false(model):
    for function in (winnow.transformers.attend_densely, winnow.transformers.choose_in_f8):
        for wrong in (1, None, "yes", torch.tensor(True)):
            refused("mode: want True or False", function, model, wrong)


def test_masks_of_functions(model):
    from transformers.masking_utils import create_causal_mask

    arguments = (model.config, torch.zeros(2, 10, 64), None, None)
    refused(
        "mask: want for every query one range",
        create_causal_mask, *arguments, and_mask_function=lambda b, h, q, kv: kv != 3,
    )  # fmt: skip
    # Blocks whose tokens see each other are ranges, too.
    blocks = torch.full((2, 10), -1)
    blocks[:, 4:7] = 0
    ranges = create_causal_mask(*arguments, block_sequence_ids=blocks)
    assert ranges[0].tolist() == [[0, max(i + 1, 7 if 4 <= i < 7 else 0)] for i in range(10)]


@pytest.mark.parametrize("dtype", [torch.float64])
def test_dtypes(dtype):
    model = make("glm_moe_dsa", "winnow").to(dtype)
    refused("dtype: want float32 or bfloat16 or float16 on cpu, got float64", model, tokens())


def test_devices():
    model = make("glm_moe_dsa", "winnow").to("meta")
    refused("device: want cpu or cuda, got meta", model, tokens().to("meta"))


def test_projections_with_a_bias_and_adapters_with_dropout():
    model = adapted(make("glm_moe_dsa", "winnow"), p=0.5).eval()
    model(tokens())
    model.train()
    refused("kv_b_proj.dropout: want no dropout in training, got p = 0.5", model, tokens())
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.base_layer.bias = torch.nn.Parameter(torch.zeros(112))
    model.eval()
    refused("kv_b_proj.base_layer: want a projection without bias", model, tokens())


def test_auto_classes():
    config = make("deepseek_v32").config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="winnow")
    assert model.config._attn_implementation == "winnow"
