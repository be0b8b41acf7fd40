"""GGUF files: their weights are those of the dequantised tensors, and they bring configuration,
tokenizer and chat template.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import find_family, make_plan
from enginebay.contracts.model import Model
from enginebay.errors import CheckpointError
from enginebay.ops.rotary import rope_frequencies
from enginebay.plugins.registry import load_registry
from enginebay.weights import QuantizedArray, Weight, WeightFormat
from enginebay_models.gguf.block_types import BLOCK_TYPES
from enginebay_models.gguf.header import read_gguf, read_parts
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.source import GgufSource
from enginebay_models.gguf.vocabulary import read_vocabulary
from enginebay_models.hf_config import FULL, SLIDING, mixed_windows
from enginebay_models.opening import open_stored_model
from enginebay_models.rope_config import read_rope
from enginebay_models.source import CheckpointSource
from enginebay_testing.model_harness import random_tensor
from tests.brief import DEMO, LEAST
from tests.gguf_files import ARCHITECTURES, MORE_FIELDS, convert, letters, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
MORE_TYPES = ("BF16", "Q4_1", "Q5_0", "Q5_1")
METHODS = {"Q4_0": "int4", "Q4_1": "uint4", "Q4_K": "uint4"}


registry = cache(load_registry)


def model_of(config: Mapping[str, Any]) -> Model:
    return find_family(registry(), config["architectures"][0]).build(config, dtype="float32")


def random_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    sources = model_of(config).tensor_sources().values()
    return {
        name: random_tensor(name, shape, 1)
        for source in sources
        for name, shape in zip(source.names, source.shapes, strict=True)
    }


def dequantised(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in f32, by the names of the file, read by the package gguf."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def load(source: GgufSource | CheckpointSource, model: Model) -> dict[str, Weight]:
    form = WeightFormat("float32", source.quantized_weights(model), source.quantization)
    return source.load_weights(model, form=form, place=lambda *_: None)


def in_f32(weight: Weight) -> np.ndarray:
    return np.asarray(_dequantized(weight) if isinstance(weight, QuantizedArray) else weight)


_dequantized = jax.jit(QuantizedArray.dequantized)


@pytest.mark.parametrize("kind", [one for one in TYPES if one not in ("F16", "BF16")])
def test_blocks_of_random_bits_are_read_as_the_package_gguf_reads_them(kind: str) -> None:
    """All scales and offsets of 16 bits, 0 among them."""
    number = gguf.GGMLQuantizationType[kind]
    form, rng = BLOCK_TYPES[number], np.random.default_rng(0)
    assert (form.num_values, form.num_bytes) == gguf.GGML_QUANT_SIZES[number]
    assert form.decode is not None
    blocks = rng.integers(0, 256, (256, form.num_bytes), np.uint8).view(form.layout)[:, 0].copy()
    for name in {"scale", "least", "offset"} & set(form.layout.names or ()):
        blocks[name] = rng.normal(size=blocks[name].shape)
        blocks[name][:9] = 0
    wanted = gguf.quants.dequantize(blocks.view(np.uint8).reshape(256, -1), number)
    groups = form.decode(blocks)
    found = groups.values.reshape(*groups.scales.shape, -1).astype(np.float32)
    if groups.zero_points is not None:
        found -= groups.zero_points[..., None]
    found *= groups.scales.astype(np.float32)[..., None]
    np.testing.assert_allclose(
        found.reshape(wanted.shape), wanted, atol=1e-7 * np.abs(wanted).max()
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=[pytest.mark.slow] if one in MORE_TYPES else []) for one in TYPES],
)
def test_a_weight_is_that_of_the_dequantised_tensor(tmp_path: Path, kind: str) -> None:
    config = CONFIG | {"num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_tensors(config), letters(320), kind)
    source, plain = GgufSource(str(path)), tmp_path / "plain.gguf"
    model = model_of(source.config)
    weights = load(source, model)
    again = _plain_tensors(path, config)
    write_gguf(plain, config, again, letters(320))
    wanted = load(GgufSource(str(plain)), model)
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        largest = np.abs(in_f32(wanted[name])).max()
        np.testing.assert_allclose(in_f32(weight), in_f32(wanted[name]), atol=1e-6 * largest)
    is_quantised = isinstance(weights["layers.0.mlp.up"], QuantizedArray)
    assert is_quantised == (kind not in ("F16", "BF16"))
    for weight in weights.values():
        if isinstance(weight, QuantizedArray):
            assert weight.method == METHODS.get(kind, "int8_group")


def _plain_tensors(path: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The dequantised tensors of a llama's file, by the names and in the order of transformers."""
    found = dequantised(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    made = {}
    for name in random_tensors(config):
        stored = names.get_name(name, try_suffixes=(".weight",))
        values = found[stored or ""]
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                pairs = values.reshape(heads, -1, 2, values.shape[-1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        made[name] = values
    return made


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("Q4_0", marks=pytest.mark.long)])
def test_tensors_of_several_weights_are_read_in_blocks(tmp_path: Path, kind: str) -> None:
    """Phi-3 has queries, keys and values in one tensor, and gate and up in another."""
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 1}
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), letters(320), kind)
    source, stored = GgufSource(str(path)), dequantised(path)
    model = model_of(source.config)
    weights, sources = load(source, model), model.tensor_sources()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.PHI3, 1)
    for name in ("layers.0.attention.qkv", "layers.0.mlp.gate_up", "layers.0.mlp.down"):
        weight, made = weights[name], sources[name]
        assert isinstance(weight, QuantizedArray)
        assert weight.method == METHODS.get(kind, "int8_group")
        read = [stored[names.get_name(one, try_suffixes=(".weight",)) or ""] for one in made.names]
        shape = model.weight_specs()[name].shape
        whole = made.build(read, (slice(None),) * len(shape))
        np.testing.assert_allclose(in_f32(weight), whole, atol=1e-6 * np.abs(whole).max())


def test_divisors_of_short_and_of_long_contexts_come_together(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"]} | MORE_FIELDS["Phi3ForCausalLM"]
    tensors = random_tensors(config)
    source = GgufSource(str(write_gguf(tmp_path / "m.gguf", config, tensors, letters(320))))
    assert model_of(source.config).info.auto_max_model_len == 64
    rule = {key: one for key, one in config["rope_scaling"].items() if key != "long_factor"}
    path = write_gguf(tmp_path / "n.gguf", config | {"rope_scaling": rule}, tensors, letters(320))
    with pytest.raises(CheckpointError, match=r"has no tensor rope_factors_long.weight"):
        GgufSource(str(path))


def test_a_group_without_a_scale_is_its_offset(tmp_path: Path) -> None:
    """K types store a constant group with scale 0; no number of it may be lost."""
    config = CONFIG | {"num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_tensors(config), letters(320), "Q4_K")
    wanted = dequantised(path)["blk.0.ffn_up.weight"]
    assert (np.ptp(wanted[:32], axis=1) > 0).all()
    assert (np.ptp(wanted[:32, :32], axis=1) == 0).all()
    assert (wanted[:32, :32] != 0).any()
    source = GgufSource(str(path))
    got = in_f32(load(source, model_of(source.config))["layers.0.mlp.up"])
    np.testing.assert_array_equal(got[:32, :32], wanted[:32, :32])


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_architecture_has_the_weights_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    config = CONFIG | {"architectures": [name]} | MORE_FIELDS.get(name, {})
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, letters(320))
    source = GgufSource(str(path))
    assert source.architecture == name
    model, wanted = model_of(source.config), model_of(config)
    assert model.info == wanted.info
    weights = load(source, model)
    for path_, made in wanted.tensor_sources().items():
        spec = wanted.weight_specs()[path_]
        whole = made.build([tensors[n] for n in made.names], (slice(None),) * len(spec.shape))
        np.testing.assert_allclose(in_f32(weights[path_]), whole, atol=3e-7)


def config_in(path: Path, name: str, config: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    """The configuration in a file that has no weights but an embedding."""
    config = CONFIG | {"architectures": [name]} | MORE_FIELDS.get(name, {}) | dict(config)
    embedding = {"model.embed_tokens.weight": np.zeros((320, 256), np.float32)}
    tokens = dataclasses.replace(letters(320), more=more)
    return GgufSource(str(write_gguf(path / "model.gguf", config, embedding, tokens))).config


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ArceeForCausalLM", "arcee.expert_count", 4),
        ("Cohere2ForCausalLM", "cohere2.attention.sliding_window_pattern", 0),
        ("CohereForCausalLM", "command-r.rope.dimension_count", 32),
        ("Ernie4_5ForCausalLM", "ernie4_5.rope.dimension_count", 32),
        ("Exaone4ForCausalLM", "exaone4.attention.sliding_window", 16),
        ("Exaone4ForCausalLM", "exaone4.nextn_predict_layers", 1),
        ("Glm4ForCausalLM", "glm4.nextn_predict_layers", 1),
        ("GPTNeoXForCausalLM", "gptneox.attention.value_length", 32),
        ("GraniteForCausalLM", "granite.rope.scaling.finetuned", False),
        ("HunYuanDenseV1ForCausalLM", "hunyuan-dense.rope.scaling.alpha", 50.0),
        ("Ministral3ForCausalLM", "mistral3.rope.scaling.yarn_log_multiplier", 0.5),
        ("NemotronForCausalLM", "nemotron.attention.value_length", 32),
        ("Olmo2ForCausalLM", "olmo2.rope.dimension_count", 32),
        ("Olmo3ForCausalLM", "olmo2.attention.sliding_window_pattern", 0),
        ("OlmoeForCausalLM", "olmoe.expert_weights_norm", True),
        ("Qwen2MoeForCausalLM", "qwen2moe.expert_weights_scale", 2.0),
        ("SeedOssForCausalLM", "seed_oss.expert_count", 4),
        ("StableLmForCausalLM", "stablelm.attention.value_length", 32),
        ("Starcoder2ForCausalLM", "starcoder2.rope.dimension_count", 32),
    ],
)
def test_other_models_of_an_architecture_are_refused_by_their_key(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    """Granite without rotary positions, GLM-OCR, ..."""
    with pytest.raises(CheckpointError, match=rf"has {re.escape(key)} = "):
        config_in(tmp_path, name, {}, **{key: value})


def test_windows_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """EXAONE 4 has them in 64 layers alone; a list of layers must be the one that is not read."""
    kinds = [SLIDING, SLIDING, SLIDING, FULL] * 16
    windows = {"num_hidden_layers": 64, "sliding_window": 16, "layer_types": kinds}
    found = config_in(tmp_path, "Exaone4ForCausalLM", windows)
    assert found["sliding_window"] == 16
    wanted = mixed_windows(windows, 64, 16, every=1)
    assert mixed_windows(found, 64, 16, every=found["sliding_window_pattern"]) == wanted
    windows |= {"layer_types": [SLIDING, FULL] * 32}
    with pytest.raises(CheckpointError, match=r"exaone4.attention.sliding_window_pattern"):
        config_in(tmp_path, "Exaone4ForCausalLM", windows)


def test_keys_that_a_file_lacks_have_the_values_of_llama_cpp(tmp_path: Path) -> None:
    """The widths of experts, the window of EXAONE 4, and the factor on queries of Mistral Small."""
    found = config_in(
        tmp_path, "Exaone4ForCausalLM", {"num_hidden_layers": 64, "sliding_window": None}
    )
    assert (found["sliding_window"], found["sliding_window_pattern"]) == (4096, 4)
    found = config_in(tmp_path, "Ministral3ForCausalLM", {"rope_scaling": None})
    assert found["rope_scaling"]["rope_type"] == "default"
    assert found["rope_scaling"]["llama_4_scaling_beta"] == 0
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    found = config_in(tmp_path, "Qwen2MoeForCausalLM", dict.fromkeys(widths))
    assert [found[name] for name in widths] == [128, 256]


def test_tensors_of_several_types_join_without_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q4_K_M files have values in Q6_K beside queries and keys in Q4_K."""
    config = CONFIG | {"num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    kinds = {"blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "F16"}
    write_gguf(path, config, random_tensors(config), letters(320), "Q4_K", kinds)
    source = GgufSource(str(path))
    model = model_of(source.config)
    weights = load(source, model)
    qkv = weights["layers.0.attention.qkv"]
    assert isinstance(qkv, QuantizedArray)
    assert (qkv.method, qkv.scales.shape[-1]) == ("int8_group", 256 // 16)
    assert isinstance(weights["layers.0.mlp.down"], jax.Array)
    values = dequantised(path)["blk.0.attn_v.weight"].reshape(2, 64, 256)
    np.testing.assert_allclose(in_f32(qkv)[:, -1], values, atol=1e-6)
    line = "Q4_K and Q6_K are joined as int8_group with 16 groups in 1 of 9 weights"
    assert [record.getMessage() for record in caplog.records] == [f"model.gguf: {line}"]


def test_quantised_experts_are_those_of_the_dequantised_tensor(tmp_path: Path) -> None:
    """One tensor has all experts of a layer."""
    config = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_tensors(config), letters(320), "Q4_K")
    source = GgufSource(str(path))
    weight = load(source, model_of(source.config))["layers.0.mlp.down"]
    assert isinstance(weight, QuantizedArray)
    wanted = dequantised(path)["blk.0.ffn_down_exps.weight"]
    assert wanted.shape == weight.shape == (4, 256, 256)
    np.testing.assert_allclose(in_f32(weight), wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.long
def test_a_file_generates_what_its_checkpoint_generates(tmp_path: Path) -> None:
    """Configuration, tokenizer, chat template and end tokens come from the file."""
    path = convert(Path(LEAST), tmp_path / "model.gguf")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    chat = [{"role": "user", "content": "Hi <|im_end|> é"}]
    texts = []
    for model in (LEAST, str(path)):
        with LLM(model, dtype="float32", max_model_len=64, max_num_seqs=1) as llm:
            texts.append(llm.generate(["Once upon a time"], params)[0].outputs[0].token_ids)
            texts.append(llm.tokenizer.apply_chat_template(chat))
    assert texts[:2] == texts[2:]
    assert set(open_stored_model(str(path)).token_info.eos_token_ids) == {0, 2}


def test_recommended_sampling_is_read_or_refused(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 1}
    path, tokens = tmp_path / "m.gguf", letters(320)
    more = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    write_gguf(path, config, random_tensors(config), dataclasses.replace(tokens, more=more))
    assert GgufSource(str(path)).sampling_defaults == {"temperature": 0.5, "top_k": 20}
    plan = make_plan(EngineConfig(model=str(path), max_model_len=64))
    reason = next(one for one in plan.reasons if one.setting == "generation_config")
    assert reason.why.startswith("general.sampling of the file")
    more = {"general.sampling.temp": -0.5}
    write_gguf(path, config, random_tensors(config), dataclasses.replace(tokens, more=more))
    with pytest.raises(CheckpointError, match=r"m.gguf: temperature = -0.5"):
        _ = GgufSource(str(path)).sampling_defaults


def test_quantised_files_are_planned_with_their_bytes(tmp_path: Path) -> None:
    path = convert(DEMO, tmp_path / "model.gguf", "Q8_0")
    plan = make_plan(EngineConfig(model=str(path), max_model_len=64))
    assert plan.weight_format.name == "gguf"
    reason = next(one for one in plan.reasons if one.setting == "quantization")
    assert "the checkpoint's own" in reason.why
    plain = make_plan(EngineConfig(model=str(path), quantization="none", max_model_len=64))
    assert not plain.weight_format.quantized


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_rules_of_rotary_positions_are_read(tmp_path: Path, kind: str) -> None:
    """Llama 3's rule is stored as a divisor for each frequency."""
    rule = {"rope_type": kind, "factor": 8.0}
    if kind != "linear":
        rule |= {"original_max_position_embeddings": 32}
    if kind == "llama3":
        rule |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = CONFIG | {"rope_scaling": rule, "num_hidden_layers": 1}
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), letters(320))
    found = GgufSource(str(path)).config
    (got, got_factor), (wanted, factor) = (
        rope_frequencies(read_rope(one).spec(64)) for one in (found, config)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert got_factor == factor


def test_a_factor_of_yarn_is_the_rules_own(tmp_path: Path) -> None:
    """The converter stores a checkpoint's attention_factor, which llama.cpp does not read."""
    name, key = "Olmo3ForCausalLM", "olmo2.rope.scaling.yarn_attn_factor"
    found = config_in(tmp_path, name, {}, **{key: 0.1 * math.log(4.0) + 1.0})
    assert found["rope_parameters"][FULL]["rope_type"] == "yarn"
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} = 1.5. Allowed: 1.0 or 1.13863"):
        config_in(tmp_path, name, {}, **{key: 1.5})


def test_another_architecture_and_type_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    _finish(writer)
    with pytest.raises(CheckpointError, match=r"unknown GGUF architecture 'mamba'.*llama.*qwen3"):
        open_stored_model(str(tmp_path / "a.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    raw = np.zeros((2, 84), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    _finish(writer)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' of type Q2_K.*Q4_K"):
        open_stored_model(str(tmp_path / "b.gguf"))


@pytest.mark.parametrize("role", ["eos", "eot", "eom"])
def test_an_end_outside_the_vocabulary_is_refused(tmp_path: Path, role: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_uint32(f"tokenizer.ggml.{role}_token_id", 4)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    _finish(writer)
    metadata = Metadata(read_parts(tmp_path / "a.gguf"))
    with pytest.raises(CheckpointError, match=rf"{role}_token_id = 4. Allowed: 0 to 3"):
        read_vocabulary(metadata)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_truncated_file_names_the_tensor_and_its_type(tmp_path: Path) -> None:
    path = convert(Path(LEAST), tmp_path / "model.gguf", "Q8_0")
    content = path.read_bytes()
    with pytest.raises(
        CheckpointError, match=r"Give the path of a GGUF file, such as .*model.gguf"
    ):
        open_stored_model(str(tmp_path))
    path.write_bytes(content[:-5000])
    with pytest.raises(CheckpointError, match=r"is truncated: tensor '[\w.]+' of type \w+ ends"):
        open_stored_model(str(path))


def test_a_tensor_of_another_shape_is_refused_with_its_type(tmp_path: Path) -> None:
    tensors = dict(load_file(Path(LEAST) / "model.safetensors"))
    config = json.loads((Path(LEAST) / "config.json").read_text(encoding="utf-8"))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)[:, :96]
    path = write_gguf(tmp_path / "m.gguf", config, tensors, letters(2048), "Q8_0")
    source = GgufSource(str(path))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' of type Q8_0 with shape"):
        load(source, model_of(source.config))
    del tensors[name]
    path = write_gguf(tmp_path / "n.gguf", config, tensors, letters(2048))
    source = GgufSource(str(path))
    with pytest.raises(CheckpointError, match=r"no tensor 'blk.0.ffn_up.weight'"):
        load(source, model_of(source.config))


def test_infinite_scales_are_refused_with_the_type(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_tensors(config), letters(320), "Q4_0")
    content = bytearray(path.read_bytes())
    info = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    content[info.start : info.start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(bytes(content))
    source = GgufSource(str(path))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' of type Q4_0.*infinity"):
        load(source, model_of(source.config))


def test_the_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    whole = convert(Path(LEAST), tmp_path / "whole.gguf")
    found = read_gguf(whole)
    half = len(found.tensors) // 2
    stored = gguf.GGUFReader(whole)
    for number, tensors in enumerate((stored.tensors[:half], stored.tensors[half:]), 1):
        name = f"model-{number:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.count", 2)
        if number == 1:
            for key, field in stored.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    kinds = field.types
                    sub = kinds[1] if len(kinds) > 1 else None
                    writer.add_key_value(key, field.contents(), kinds[0], sub_type=sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data)
        _finish(writer)
    source = GgufSource(str(tmp_path / "model-00001-of-00002.gguf"))
    load(source, model_of(source.config))
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf"):
        open_stored_model(str(tmp_path / "model-00001-of-00002.gguf"))


def test_bytes_of_a_plan_are_those_of_the_loaded_weights(tmp_path: Path) -> None:
    """Each array has the shape and the dtype that the memory plan counted."""
    path = convert(DEMO, tmp_path / "model.gguf", "Q4_0")
    source = GgufSource(str(path))
    model = model_of(source.config)
    planned, weights = source.quantized_weights(model), load(source, model)
    assert planned
    for name, arrays in planned.items():
        for one, array in zip(
            jax.tree.leaves(dataclasses.replace(arrays)),
            jax.tree.leaves(weights[name]),
            strict=True,
        ):
            assert (one.spec.shape, one.dtype) == (array.shape, str(array.dtype))
