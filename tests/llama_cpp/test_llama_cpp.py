"""GGUF files against llama.cpp: token ids, and logits of files that its own tool quantised.

`make test-gguf` makes an environment with llama-cpp-python, and names its Python in
LLAMA_CPP_PYTHON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from enginebay import EngineConfig
from enginebay.compose.composition import find_family, make_plan
from enginebay.plugins.registry import load_registry
from enginebay_models.gguf.pre_tokenizers import PRE_TOKENIZERS
from enginebay_models.gguf.source import GgufSource
from enginebay_testing.model_harness import random_tensor
from enginebay_testing.reference import ReferenceModel
from tests.brief import DEMO, ROOT
from tests.gguf_files import (
    MORE_FIELDS,
    Tokens,
    demo_tokens,
    learnt_tokens,
    letters,
    write_gguf,
)
from tests.llama_cpp.running import PYTHON, ask
from tests.llama_cpp.texts import texts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="LLAMA_CPP_PYTHON names no Python with llama-cpp-python"),
]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "sliding_window": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
OF_ARCHITECTURE: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"rope_theta": 1000000.0, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 7, "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    **{
        name: MORE_FIELDS.get(name, {})
        for name in ("Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "Glm4ForCausalLM",
                     "GPTNeoXForCausalLM", "HunYuanDenseV1ForCausalLM", "Ministral3ForCausalLM",
                     "NemotronForCausalLM", "Olmo3ForCausalLM", "Qwen2MoeForCausalLM",
                     "SeedOssForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM")
    },
    **{
        name: MORE_FIELDS[name] | {"attention_bias": False, "tie_word_embeddings": True}
        for name in ("ArceeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM")
    },
    "OlmoeForCausalLM": MORE_FIELDS["OlmoeForCausalLM"] | {"num_key_value_heads": 4},
}  # fmt: skip
KINDS = {"Q4_K_S": "Q4_K", "Q5_K_S": "Q5_K"} | {
    kind: kind for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")
}
"""Names of llama.cpp's tool -> type of the tensors."""
TOKEN_IDS = np.random.default_rng(3).integers(259, 512, 40).tolist()


def random_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    family = find_family(load_registry(), config["architectures"][0])
    sources = family.build(config, dtype="float32").tensor_sources().values()
    return {
        name: random_tensor(name, shape, 1)
        for source in sources
        for name, shape in zip(source.names, source.shapes, strict=True)
    }


def our_logits(path: Path) -> np.ndarray:
    plan = make_plan(EngineConfig(model=str(path), dtype="float32", max_model_len=128))
    return ReferenceModel(plan).logits(TOKEN_IDS)


def dequantised(path: Path, made: Path) -> Path:
    """Write a file's tensors in f32 with the package gguf, and everything else as it is."""
    found = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(made, found.fields["general.architecture"].contents())
    for key, field in found.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            sub = kinds[1] if len(kinds) > 1 else None
            writer.add_key_value(key, field.contents(), kinds[0], sub_type=sub)
    for tensor in found.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def assert_same_logits(folder: Path, path: Path, tolerance: float = 1e-3) -> None:
    """Compare with llama.cpp's logits for the dequantised weights of a file."""
    plain = dequantised(path, folder / "plain.gguf")
    wanted = np.asarray(ask(folder, "logits", path=str(plain), token_ids=TOKEN_IDS))
    got = our_logits(path)
    print(path.name, "largest difference", np.abs(got - wanted).max(), "of", np.abs(wanted).max())
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(got, wanted, atol=tolerance)


@pytest.mark.parametrize("name", list(OF_ARCHITECTURE))
def test_an_architecture_has_llama_cpps_logits(tmp_path: Path, name: str) -> None:
    config = CONFIG | {"architectures": [name]} | OF_ARCHITECTURE[name]
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), letters(512))
    # llama.cpp looks GELU up in a table of f16 numbers.
    of_table = name in ("Gemma3ForCausalLM", "GPTNeoXForCausalLM", "Starcoder2ForCausalLM")
    assert_same_logits(tmp_path, path, 2e-2 if of_table else 1e-3)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_type_has_the_logits_of_its_dequantised_weights(tmp_path: Path, kind: str) -> None:
    plain = write_gguf(tmp_path / "f32.gguf", CONFIG, random_tensors(CONFIG), letters(512))
    path = tmp_path / f"{kind}.gguf"
    ask(tmp_path, "quantize", path=str(plain), made=str(path), kind=kind, pure=True)
    kinds = {one.tensor_type.name for one in gguf.GGUFReader(path).tensors}
    assert kinds == {"F32", KINDS[kind]}
    assert_same_logits(tmp_path, path)


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M"])
def test_mixed_types_have_the_logits_of_their_dequantised_weights(
    tmp_path: Path, kind: str
) -> None:
    config = CONFIG | {"num_hidden_layers": 8}
    plain = write_gguf(tmp_path / "f32.gguf", config, random_tensors(config), letters(512))
    path = tmp_path / f"{kind}.gguf"
    ask(tmp_path, "quantize", path=str(plain), made=str(path), kind=kind, pure=False)
    kinds = {one.tensor_type.name for one in gguf.GGUFReader(path).tensors}
    assert {"Q6_K", kind[:4]} <= kinds
    assert_same_logits(tmp_path, path)


def assert_same_tokens(folder: Path, tokens: Tokens) -> None:
    config = CONFIG | {"num_hidden_layers": 1, "vocab_size": len(tokens.texts)}
    rows = {"model.embed_tokens.weight": np.zeros((len(tokens.texts), 256), np.float32)}
    path = write_gguf(folder / "v.gguf", config, rows, tokens)
    given = texts()
    assert len(given) == 200
    wanted = ask(folder, "tokenize", path=str(path), texts=given)
    tokenizer = GgufSource(str(path)).load_tokenizer()
    for text, ids in zip(given, wanted, strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_byte_pairs_are_llama_cpps(tmp_path: Path, pre: str) -> None:
    tokens = demo_tokens(DEMO, pre)
    if PRE_TOKENIZERS[pre].adds_bos:  # the file may leave it to the name
        more = {k: v for k, v in tokens.more.items() if k != "tokenizer.ggml.add_bos_token"}
        tokens = dataclasses.replace(tokens, more=more)
    assert_same_tokens(tmp_path, tokens)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    ],
)
def test_pieces_with_scores_are_llama_cpps(tmp_path: Path, more: dict[str, Any]) -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))[:20]]
    assert_same_tokens(tmp_path, learnt_tokens(pages, 2000, **more))
