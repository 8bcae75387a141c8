"""What the families of models do differently: projections, rotary parts, norms, gates, sinks.

A family's methods take the modules of transformers and call the layers inside them, so that
adapters, quantised weights and hooks count. Heads stand behind queries: [batch, queries, heads, d].
"""

import sys
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class Projected(NamedTuple):
    """Queries, and the latent rows of this call and of the cache."""

    q_pass: Tensor  # [batch, queries, heads, d]
    q_rope: Tensor  # [batch, queries, heads, 64 or 0], rotated
    latent: Tensor  # [batch, rows, 512], normalised
    k_rope: Tensor  # [batch, rows, 64 or 0], rotated
    q_resid: Optional[Tensor]  # [batch, queries, q_lora_rank], of which the indexer makes queries


class Family:
    """Multi-head latent attention with a latent for queries, as in DeepSeek-V3.2 and GLM-5."""

    def __init__(self, name: str, prefix: str, shares_indices: bool, towers: Tuple[str, ...] = ()):
        """name: the folder in transformers; prefix: of its classes' names; towers: model types of
        the parts without an indexer that its models have."""
        self.module = f"transformers.models.{name}.modeling_{name}"
        self.attention = prefix + "Attention"
        self.indexer = prefix + "Indexer"
        self.shares_indices = shares_indices  # of one layer with those after it
        self.towers = towers

    @property
    def replaced(self) -> Tuple[str, ...]:
        """The classes of modules whose forward passes "winnow" stands in for."""
        return self.attention, self.indexer

    # The rotary functions of the model's own file, for the attention and for the indexer.
    rotation = "apply_rotary_pos_emb_interleave"
    indexer_rotation = "apply_rotary_pos_emb_interleave"
    rope_first = True  # of the indexer's columns, the rotary ones
    restarts = True  # position_ids that restart begin another sequence

    def _rotate(self, name: str, q: Tensor, k: Optional[Tensor], embeddings) -> Tuple[Any, Any]:
        rotate = getattr(sys.modules[self.module], name)
        return rotate(q, k, *embeddings, unsqueeze_dim=2)

    # ---- the attention

    child = "kv_b_proj"  # a module that only attention layers of the family have

    def has_indexer(self, attention) -> bool:
        """Whether the layer is one of those that attend to chosen rows."""
        return True

    def indexer_of(self, attention) -> Optional[torch.nn.Module]:
        """The indexer that a layer has itself."""
        return attention.indexer

    def query_latent(self, attention, hidden: Tensor) -> Tensor:
        return attention.q_a_layernorm(attention.q_a_proj(hidden))

    def row_latent(self, attention, compressed: Tensor) -> Tensor:
        return attention.kv_a_layernorm(compressed)

    def row_rope(self, attention, k_rope: Tensor) -> Tensor:
        return k_rope

    def project(self, attention, hidden, embeddings, position_ids, cache, shared) -> Projected:
        batch, queries, _ = hidden.shape
        rope = attention.qk_rope_head_dim
        q_resid = self.query_latent(attention, hidden)
        q = attention.q_b_proj(q_resid).view(batch, queries, -1, attention.qk_head_dim)
        q_pass, q_rope = q.split([attention.qk_nope_head_dim, rope], -1)
        compressed = attention.kv_a_proj_with_mqa(hidden)
        latent, k_rope = compressed.split([attention.kv_lora_rank, rope], -1)
        latent = self.row_latent(attention, latent)
        k_rope = self.row_rope(attention, k_rope)
        rotated = self._rotate(self.rotation, q_rope, k_rope[:, :, None], embeddings)
        q_rope, k_rope = rotated[0].to(q.dtype), rotated[1].to(k_rope.dtype)
        latent, k_rope = cached(attention, cache, latent, k_rope[:, :, 0])
        return Projected(q_pass, q_rope, latent, k_rope, q_resid)

    def sink(self, attention) -> Optional[Tensor]:
        return None

    def gated(self, attention, hidden: Tensor, values: Tensor) -> Tensor:
        """What o_proj gets of the values, [batch, queries, heads, d_v]."""
        return values

    # ---- the indexer

    def indexer_query(self, indexer, hidden, q_resid, position_ids) -> Tensor:
        return indexer.wq_b(q_resid).view(*hidden.shape[:2], indexer.n_heads, indexer.head_dim)

    def indexer_key(self, indexer, hidden) -> Tensor:
        return indexer.k_norm(indexer.wk(hidden))

    def indexer_rotates(self, indexer) -> bool:
        return True

    def score(self, indexer, hidden, q_resid, embeddings, position_ids):
        """(q, k, weights) of the indexer: [batch, queries, heads, d], [batch, queries, d] before
        the cache, and [batch, queries, heads] in float32 with all scales folded in."""
        q = self.indexer_query(indexer, hidden, q_resid, position_ids)
        k = self.indexer_key(indexer, hidden)[:, :, None]
        if self.indexer_rotates(indexer):
            rope = indexer.qk_rope_head_dim
            sizes = [rope, indexer.head_dim - rope]
            at = 0 if self.rope_first else 1
            parts_q, parts_k = (
                list(t.split(sizes if at == 0 else sizes[::-1], -1)) for t in (q, k)
            )
            rotated = self._rotate(self.indexer_rotation, parts_q[at], parts_k[at], embeddings)
            parts_q[at], parts_k[at] = rotated
            q, k = torch.cat(parts_q, -1), torch.cat(parts_k, -1)
        projection = indexer.weights_proj
        weights = projection(hidden.to(projection.weight.dtype)).float()
        return q, k[:, :, 0], weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def cached(attention, cache, latent: Tensor, k_rope: Tensor) -> Tuple[Tensor, Tensor]:
    """The rows of the cache with those of this call, [batch, rows, d] each."""
    if cache is None:
        return latent, k_rope
    latent, k_rope = cache.update(latent[:, None], k_rope[:, None], attention.layer_idx)
    return latent[:, 0], k_rope[:, 0]


class DeepseekV32(Family):
    indexer_rotation = "apply_rotary_pos_emb"


class HYV4(Family):
    """Half-split rotary parts, the indexer's behind its other columns; a sink for each head; a gate
    for each column."""

    rotation = indexer_rotation = "apply_rotary_pos_emb"
    rope_first = False

    def sink(self, attention) -> Tensor:
        return attention.sinks

    def gated(self, attention, hidden, values) -> Tensor:
        return values * torch.sigmoid(attention.gate_proj(hidden).view(values.shape))

    def indexer_key(self, indexer, hidden) -> Tensor:
        key = indexer.wk(hidden).to(indexer.k_norm.weight.dtype)  # which stays float32
        return indexer.k_norm(key).to(hidden.dtype)


class HYV4VL(HYV4):
    restarts = False  # it takes positions of three kinds, and asks for a mask without them


class Dots3Note(Family):
    """Scaled latents, a norm on the rotary part of the rows, a gate for each head; layers with a
    sliding window, which stay as they are."""

    def has_indexer(self, attention) -> bool:
        return attention.indexer is not None

    def query_latent(self, attention, hidden) -> Tensor:
        return super().query_latent(attention, hidden) * attention.q_lora_scale

    def row_latent(self, attention, compressed) -> Tensor:
        return super().row_latent(attention, compressed.contiguous()) * attention.kv_lora_scale

    def row_rope(self, attention, k_rope) -> Tensor:
        return attention.k_rope_only_layernorm(k_rope)

    def gated(self, attention, hidden, values) -> Tensor:
        return values * torch.sigmoid(attention.g_proj(hidden)[..., None])


class MistralLarge4(Family):
    """Queries without a latent, scaled by position; layers without rotary parts; rows that later
    layers share."""

    def project(self, attention, hidden, embeddings, position_ids, cache, shared) -> Projected:
        batch, queries, _ = hidden.shape
        rope = attention.qk_rope_head_dim
        sizes = [attention.qk_nope_head_dim, rope]
        q = attention.q_proj(hidden).view(batch, queries, -1, attention.qk_head_dim)
        q_pass, q_rope = q.split(sizes, -1)
        k_rope = None
        if not attention.is_kv_shared_layer:
            compressed = attention.kv_a_proj_with_mqa(hidden)
            latent, k_rope = compressed.split([attention.kv_lora_rank, rope], -1)
            latent, k_rope = self.row_latent(attention, latent), k_rope[:, :, None]
        if attention.use_rope:
            q_rope, k_rope = self._rotate(self.rotation, q_rope, k_rope, embeddings)
        # Rows are shared in the shape that the cache has.
        name = "rope" if attention.use_rope else "nope"
        if attention.is_kv_shared_layer:
            latent, k_rope = (rows[:, 0] for rows in shared[name])
        else:
            latent, k_rope = cached(attention, cache, latent, k_rope[:, :, 0])
        if attention.store_full_length_kv:
            shared[name] = (latent[:, None], k_rope[:, None])
        q = torch.cat((q_pass, q_rope), -1)
        q = attention.softmax_scaling(q, position_ids, head_dim_first=False)
        return Projected(*q.split(sizes, -1), latent, k_rope, None)

    def indexer_query(self, indexer, hidden, q_resid, position_ids) -> Tensor:
        q = super().indexer_query(indexer, hidden, indexer.q_input_norm(hidden), position_ids)
        return indexer.softmax_scaling(q, position_ids, head_dim_first=False)

    def indexer_rotates(self, indexer) -> bool:
        return bool(indexer.use_rope)


class DeepseekV4(Family):
    """One row a token as key and value of all heads, a sliding window, and compressed rows beside
    it: all of them, or those that an indexer chooses. See compressed.py."""

    rotation = "apply_rotary_pos_emb"  # of the last columns
    child = "o_a_proj"

    @property
    def replaced(self) -> Tuple[str, ...]:
        compressors = ("DeepseekV4CSACompressor", "DeepseekV4HCACompressor")
        return self.attention, *compressors, self.indexer

    def has_indexer(self, attention) -> bool:
        """All layers run on Winnow, also those without one."""
        return True

    def indexer_of(self, attention) -> Optional[torch.nn.Module]:
        return getattr(attention.compressor, "indexer", None)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, queries, heads, d]"""
        return getattr(sys.modules[self.module], self.rotation)(x, cos, sin, unsqueeze_dim=2)

    def attention_query(self, attention, q_resid: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = attention.q_b_proj(q_resid).view(*q_resid.shape[:2], -1, attention.head_dim)
        return self.rotated(attention.q_b_norm(q), cos, sin)

    def query_latent(self, attention, hidden: Tensor) -> Tensor:
        return attention.q_a_norm(attention.q_a_proj(hidden))

    def row(self, attention, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, queries, 1, d]"""
        kv = attention.kv_norm(attention.kv_proj(hidden))
        return self.rotated(kv[:, :, None], cos, sin)

    def output(self, attention, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rows are rotated by their positions, and are values, too: the inverse rotation by that of
        the query leaves the distance between them."""
        values = self.rotated(values, cos, -sin)
        groups = values.reshape(*values.shape[:2], attention.config.o_groups, -1)
        return attention.o_b_proj(attention.o_a_proj(groups).flatten(2))

    def indexer_query(self, indexer, hidden, q_resid, position_ids) -> Tensor:
        q = indexer.q_b_proj(q_resid).view(*hidden.shape[:2], -1, indexer.head_dim)
        cos, sin = indexer.rotary_emb(
            hidden, position_ids=position_ids, layer_type=indexer.rope_layer_type
        )
        return self.rotated(q, cos, sin)

    def indexer_weights(self, indexer, hidden) -> Tensor:
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden).float()
        return weights * (scorer.softmax_scale * scorer.weights_scaling)
