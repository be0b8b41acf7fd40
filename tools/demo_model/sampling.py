"""Writes text with the demo model, plainly and slowly: the whole row is computed again for each
token.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import demo_llama
import demo_tokenizer as dt

MAX_LENGTH = 384
STOPS = (dt.END_OF_TEXT_ID, dt.TURN_END_ID)


@partial(jax.jit, static_argnames=("shape",))
def _next_logits(
    params: demo_llama.Params, tokens: jax.Array, last: jax.Array, shape: demo_llama.Shape
) -> jax.Array:
    """The scores for the token after position `last` of tokens [1, MAX_LENGTH]; what stands behind
    it has no effect.
    """
    logits = demo_llama.forward(params, tokens, jnp.zeros_like(tokens), shape, jnp.float32)
    return logits[0, last]


def generate(
    params: demo_llama.Params,
    tokenizer: Tokenizer,
    prompt: str,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[str, bool]:
    """Continue a prompt until a stop token; returns the new text and whether the model stopped by
    itself.
    """
    shape = demo_llama.Shape()
    rng = np.random.default_rng(seed)
    ids = list(tokenizer.encode(prompt).ids)
    start = len(ids)
    while len(ids) < MAX_LENGTH:
        row = np.full((1, MAX_LENGTH), dt.PAD_ID, np.int32)
        row[0, : len(ids)] = ids
        scores = np.asarray(_next_logits(params, row, len(ids) - 1, shape), np.float64)
        if temperature > 0:
            scores = scores / temperature + rng.gumbel(size=scores.shape)
        token = int(scores.argmax())
        if token in STOPS:
            return tokenizer.decode(ids[start:]), True
        ids.append(token)
    return tokenizer.decode(ids[start:]), False


def chat_prompt(question: str) -> str:
    """A question as the chat template renders it, with the header of the answer."""
    header, body = dt.render_turn({"role": "user", "content": question})
    return f"{header}{body}{dt.TURN_START}assistant\n"
