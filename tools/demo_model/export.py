"""Writes the demo model as an ordinary Hugging Face checkpoint directory, and reads its weights
back.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file
from tokenizers import Tokenizer

import demo_tokenizer as dt
from demo_llama import Params, Shape

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Result:
    """What the model card reports about a run."""

    num_steps: int
    tokens_per_step: int
    seed: int
    num_train: int
    num_heldout: int
    perplexity: float
    story_perplexity: float
    chat_perplexity: float
    num_parameters: int


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON with a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(shape: Shape) -> dict[str, Any]:
    """config.json as transformers expects it for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": dt.END_OF_TEXT_ID,
        "dtype": "bfloat16",
        "eos_token_id": dt.END_OF_TEXT_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": dt.PAD_ID,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def generation_config() -> dict[str, Any]:
    """generation_config.json: both the end of a text and the end of a turn stop the model."""
    return {
        "bos_token_id": dt.END_OF_TEXT_ID,
        "eos_token_id": [dt.END_OF_TEXT_ID, dt.TURN_END_ID],
        "pad_token_id": dt.PAD_ID,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template inside."""
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(dt.SPECIALS)
        },
        "bos_token": dt.END_OF_TEXT,
        "chat_template": dt.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": dt.END_OF_TEXT,
        "model_max_length": shape.max_positions,
        "pad_token": dt.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def rounded(params: Params) -> Params:
    """The parameters as the checkpoint stores them, in bfloat16."""
    return {name: value.astype(jnp.bfloat16) for name, value in params.items()}


def write_checkpoint(folder: Path, params: Params, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write every file but the model card. The weights appear under their name only when they are
    complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model_config(shape))
    _write_json(folder / "generation_config.json", generation_config())
    _write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    partial = folder / (WEIGHTS_FILE + ".partial")
    save_file(dict(sorted(rounded(params).items())), str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / WEIGHTS_FILE)


def read_weights(folder: Path) -> Params:
    """The weights of a checkpoint in float32."""
    loaded = load_file(str(folder / WEIGHTS_FILE))
    return {name: jnp.asarray(np.asarray(value, np.float32)) for name, value in loaded.items()}
