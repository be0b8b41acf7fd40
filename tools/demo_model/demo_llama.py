"""The Llama of the demo model in plain JAX: parameters under their Hugging Face names, and one
forward pass.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model. The defaults keep the bfloat16 weights near five megabytes."""

    vocab_size: int = 2048
    hidden: int = 192
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 448
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape; matrices are stored as [out, in]."""
    hidden, inner = shape.hidden, shape.intermediate
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (heads, hidden),
            layer + "self_attn.k_proj.weight": (kv_heads, hidden),
            layer + "self_attn.v_proj.weight": (kv_heads, hidden),
            layer + "self_attn.o_proj.weight": (hidden, heads),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def is_hidden_matrix(name: str) -> bool:
    """Whether a tensor is one of the matrices inside the layers (not the embedding, not a norm)."""
    return name.endswith("_proj.weight")


def init_params(shape: Shape, seed: int) -> Params:
    """Fresh parameters: norms at one, matrices normal with a standard deviation of 0.02, outputs of
    a block smaller.
    """
    rng = np.random.default_rng(seed)
    depth_scale = (2 * shape.num_layers) ** -0.5
    params = {}
    for name, size in parameter_shapes(shape).items():
        if len(size) == 1:
            params[name] = jnp.ones(size, jnp.float32)
            continue
        scale = 0.02 * (depth_scale if "o_proj" in name or "down_proj" in name else 1.0)
        params[name] = jnp.asarray(rng.normal(0.0, scale, size), jnp.float32)
    return params


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale each row of x to a root mean square of one, then by the weight; computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x times the transpose of an [out, in] weight, in the dtype of x."""
    return x @ weight.astype(x.dtype).T


def _rope_tables(shape: Shape, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles for positions 0 to length - 1, shaped [length,
    head_dim].
    """
    inverse = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = np.arange(length)[:, None] * inverse[None, :]
    angles = np.concatenate([angles, angles], axis=-1)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply the rotary embedding to x of shape [batch, heads, length, head_dim]; halves are paired,
    as in Llama.
    """
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (x * cos + rotated * sin).astype(x.dtype)


def _mix_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Attention of one row, and what its gradient needs again."""
    kv_heads, length, _ = k.shape
    scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32).reshape(kv_heads, -1, length, length)
    weights = jax.nn.softmax(scores + mask, axis=-1).astype(q.dtype).reshape(kv_heads, -1, length)
    mixed = weights @ v
    return mixed, (q, k, v, weights, mixed)


def _mix_backward(
    saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """The gradient of `_mix`. The barriers keep the transposes out of the products, where a CPU is
    slow at them.
    """
    q, k, v, weights, mixed = saved
    weights_t = jax.lax.optimization_barrier(weights.swapaxes(-1, -2))
    inner = jnp.sum(grad.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    grad_weights = (grad @ v.swapaxes(-1, -2)).astype(jnp.float32)
    grad_scores = (weights.astype(jnp.float32) * (grad_weights - inner)).astype(q.dtype)
    grad_scores_t = jax.lax.optimization_barrier(grad_scores.swapaxes(-1, -2))
    return grad_scores @ k, grad_scores_t @ q, weights_t @ grad, None


@jax.custom_vjp
def _mix(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of one row: q [kv_heads, group * length, head_dim], k and v [kv_heads, length,
    head_dim].
    """
    return _mix_forward(q, k, v, mask)[0]


_mix.defvjp(_mix_forward, _mix_backward)


def _attention(
    params: Params, layer: str, x: jax.Array, mask: jax.Array, shape: Shape
) -> jax.Array:
    """Grouped-query attention; mask is additive, [batch, length, length]. One row at a time, which
    fits a cache.
    """
    batch, length, _ = x.shape
    cos, sin = _rope_tables(shape, length)

    def heads(name: str, count: int) -> jax.Array:
        out = _linear(x, params[f"{layer}self_attn.{name}_proj.weight"])
        return out.reshape(batch, length, count, shape.head_dim).transpose(0, 2, 1, 3)

    q = _rotate(heads("q", shape.num_heads), cos, sin) * shape.head_dim**-0.5
    k = _rotate(heads("k", shape.num_kv_heads), cos, sin)
    v = heads("v", shape.num_kv_heads)
    group = shape.num_heads // shape.num_kv_heads
    q = q.astype(x.dtype).reshape(batch, shape.num_kv_heads, group * length, shape.head_dim)
    mixed = jax.lax.map(lambda row: _mix(*row), (q, k, v, mask))
    mixed = mixed.reshape(batch, shape.num_heads, length, shape.head_dim).transpose(0, 2, 1, 3)
    return _linear(mixed.reshape(batch, length, -1), params[f"{layer}self_attn.o_proj.weight"])


def _mlp(params: Params, layer: str, x: jax.Array) -> jax.Array:
    """The gated feed-forward block."""
    gate = jax.nn.silu(_linear(x, params[layer + "mlp.gate_proj.weight"]))
    up = _linear(x, params[layer + "mlp.up_proj.weight"])
    return _linear(gate * up, params[layer + "mlp.down_proj.weight"])


def attention_mask(segments: jax.Array) -> jax.Array:
    """The additive mask [batch, length, length]: each token sees the earlier ones of its own
    segment.
    """
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    allowed = causal & (segments[:, :, None] == segments[:, None, :])
    return jnp.where(allowed, 0.0, -1e9).astype(jnp.float32)


def forward(
    params: Params, tokens: jax.Array, segments: jax.Array, shape: Shape, dtype: jnp.dtype
) -> jax.Array:
    """Logits [batch, length, vocab] in float32 for tokens [batch, length]; `dtype` is that of the
    activations.
    """
    mask = attention_mask(segments)
    embedding = params["model.embed_tokens.weight"].astype(dtype)
    x = embedding[tokens]
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        normed = _rms_norm(x, params[layer + "input_layernorm.weight"], shape.norm_eps)
        x = x + _attention(params, layer, normed, mask, shape)
        normed = _rms_norm(x, params[layer + "post_attention_layernorm.weight"], shape.norm_eps)
        x = x + _mlp(params, layer, normed)
    x = _rms_norm(x, params["model.norm.weight"], shape.norm_eps)
    return (x @ embedding.T).astype(jnp.float32)
