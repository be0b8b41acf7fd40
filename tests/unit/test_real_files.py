"""The files of published checkpoints: names of architectures, parts of larger models, order of
refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from enginebay.compose.composition import find_family, make_plan
from enginebay.config import EngineConfig
from enginebay.errors import CheckpointError
from enginebay.plugins.registry import load_registry
from enginebay_models.checkpoint import read_architecture
from enginebay_models.source import CheckpointSource, quantization_of
from tests.unit.checkpoints import CONFIG, model_of, random_tensors, write

PUBLISHED = {
    "allenai/OLMo-1B-hf": ("OlmoForCausalLM", "olmo"),
    "allenai/OLMo-2-1124-7B": ("Olmo2ForCausalLM", "olmo2"),
    "allenai/OLMoE-1B-7B-0924": ("OlmoeForCausalLM", "olmoe"),
    "allenai/Olmo-3-1025-7B": ("Olmo3ForCausalLM", "olmo3"),
    "arcee-ai/AFM-4.5B": ("ArceeForCausalLM", "arcee"),
    "baidu/ERNIE-4.5-0.3B-PT": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "baidu/ERNIE-4.5-21B-A3B-PT": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "bigcode/starcoderbase-1b": ("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "bigcode/starcoder2-3b": ("Starcoder2ForCausalLM", "starcoder2"),
    "bigscience/bloom-560m": ("BloomForCausalLM", "bloom"),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": ("SeedOssForCausalLM", "seed_oss"),
    "CohereLabs/c4ai-command-r-v01": ("CohereForCausalLM", "cohere"),
    "CohereLabs/c4ai-command-r7b-12-2024": ("Cohere2ForCausalLM", "cohere2"),
    "deepseek-ai/DeepSeek-V2-Lite": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "EleutherAI/gpt-j-6b": ("GPTJForCausalLM", "gptj"),
    "EleutherAI/gpt-neo-125m": ("GPTNeoForCausalLM", "gpt_neo"),
    "EleutherAI/pythia-160m": ("GPTNeoXForCausalLM", "gpt_neox"),
    "facebook/opt-125m": ("OPTForCausalLM", "opt"),
    "google/gemma-2b": ("GemmaForCausalLM", "gemma"),
    "google/gemma-2-2b-it": ("Gemma2ForCausalLM", "gemma2"),
    "google/gemma-3-1b-it": ("Gemma3ForCausalLM", "gemma3_text"),
    "google/gemma-3-4b-it": ("Gemma3ForConditionalGeneration", "gemma3"),
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3ForCausalLM", "smollm3"),
    "ibm-granite/granite-4.0-h-tiny": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "ibm-granite/granite-4.0-micro": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "ibm-granite/granite-3.0-1b-a400m-base": ("GraniteMoeForCausalLM", "granitemoe"),
    "ibm-granite/granite-3.3-2b-instruct": ("GraniteForCausalLM", "granite"),
    "ibm-research/moe-7b-1b-active-shared-experts": (
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
    ),
    "internlm/internlm3-8b-instruct": ("InternLM3ForCausalLM", "internlm3"),
    "kyutai/helium-1-2b": ("HeliumForCausalLM", "helium"),
    "LiquidAI/LFM2-1.2B": ("Lfm2ForCausalLM", "lfm2"),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": ("Exaone4ForCausalLM", "exaone4"),
    "LiquidAI/LFM2-8B-A1B": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "meta-llama/Llama-3.2-1B": ("LlamaForCausalLM", "llama"),
    "tencent/Hunyuan-7B-Instruct": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "the first Llama conversions": ("LLaMAForCausalLM", "llama"),
    "microsoft/phi-2": ("PhiForCausalLM", "phi"),
    "microsoft/Phi-3-mini-4k-instruct": ("Phi3ForCausalLM", "phi3"),
    "microsoft/Phi-3.5-MoE-instruct": ("PhimoeForCausalLM", "phimoe"),
    "MiniMaxAI/MiniMax-M2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "mistralai/Mistral-7B-v0.1": ("MistralForCausalLM", "mistral"),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        "Mistral3ForConditionalGeneration",
        "mistral3",
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("MixtralForCausalLM", "mixtral"),
    "mosaicml/mpt-7b": ("MPTForCausalLM", "mpt"),
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": ("FalconH1ForCausalLM", "falcon_h1"),
    "transformers' own Ministral": ("MinistralForCausalLM", "ministral"),
    "transformers' own Ministral 3": ("Ministral3ForCausalLM", "ministral3"),
    "transformers' own MPT": ("MptForCausalLM", "mpt"),
    "nvidia/Minitron-4B-Base": ("NemotronForCausalLM", "nemotron"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("NemotronHForCausalLM", "nemotron_h"),
    "openai-community/gpt2": ("GPT2LMHeadModel", "gpt2"),
    "openai/gpt-oss-20b": ("GptOssForCausalLM", "gpt_oss"),
    "Qwen/Qwen1.5-MoE-A2.7B": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "Qwen/Qwen2.5-0.5B": ("Qwen2ForCausalLM", "qwen2"),
    "Qwen/Qwen3-0.6B": ("Qwen3ForCausalLM", "qwen3"),
    "Qwen/Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "swiss-ai/Apertus-8B-Instruct-2509": ("ApertusForCausalLM", "apertus"),
    "Salesforce/codegen-350M-mono": ("CodeGenForCausalLM", "codegen"),
    "rednote-hilab/dots.llm1.base": ("Dots1ForCausalLM", "dots1"),
    "stabilityai/stablelm-2-1_6b": ("StableLmForCausalLM", "stablelm"),
    "tiiuae/falcon-7b": ("FalconForCausalLM", "falcon"),
    "zai-org/GLM-4-9B-0414": ("Glm4ForCausalLM", "glm4"),
    "zai-org/GLM-4.5-Air": ("Glm4MoeForCausalLM", "glm4_moe"),
    "zai-org/GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
    "zai-org/glm-4-9b-chat-hf": ("GlmForCausalLM", "glm"),
}
"""Checkpoint -> architectures and model_type of its config.json."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_architecture_that_a_published_file_names_is_served(name: str) -> None:
    architecture, model_type = PUBLISHED[name]
    registry = load_registry()
    config = {"architectures": [architecture], "model_type": model_type}
    family = find_family(registry, read_architecture(config))
    assert architecture in family.architectures
    if model_type not in ("gemma3", "mistral3"):  # transformers maps these to the whole model
        by_type = find_family(registry, read_architecture({"model_type": model_type}))
        assert by_type is family


def test_every_row_of_the_docs_has_a_published_file() -> None:
    text = (Path(__file__).parents[2] / "docs/supported.md").read_text()
    table = text.partition("| architecture |")[2].partition("\n\n")[0]
    named = {
        part
        for part in table.split("`")
        if part.endswith(("CausalLM", "Generation", "LMHeadModel"))
    }
    assert named == {architecture for architecture, _ in PUBLISHED.values()}


def test_most_of_the_architectures_in_use_are_served_and_the_docs_say_which() -> None:
    text = (Path(__file__).parents[2] / "docs/supported.md").read_text()
    listed = text.partition("are not bold are served:")[2].partition(".")[0]
    names = [name.strip() for name in listed.split(",")]
    mapped = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    ready = load_registry().ready("model")
    known = {one for entry in ready for one in entry.capability("architectures")}
    refused = set[str]()
    for name in names:
        plain = name.strip("*")
        whole = {plain, f"{plain}ForCausalLM"} & (mapped | known)
        assert len(whole) == 1, f"transformers maps no {plain}"
        if name != plain:
            refused |= whole
        assert bool(whole & known) == (name == plain), f"{plain} is told wrongly"
    assert len(set(names)) == 60
    assert len(names) - len(refused) >= 45
    assert f"The {len(names) - len(refused)} that are not bold are served" in text


GEMMA_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""The fields of the published config.json that say something of the model."""


def test_gemma_3_4b_is_read_from_its_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4B))
    source = CheckpointSource(str(tmp_path))
    assert source.token_info.eos_token_ids == (1, 106)
    model = find_family(load_registry(), source.architecture).build(source.config, dtype="bfloat16")
    info = model.info
    assert (info.family, info.vocab_size, info.hidden_size) == ("gemma3", 262208, 2560)
    assert info.attention["full"].num_q_heads == 8
    assert [(one.num_layers, one.num_kv_heads, one.window) for one in info.groups] == [
        (29, 4, 1024),
        (5, 4, None),
    ]


@pytest.mark.parametrize("prefixes", [("language_model.model.",), ("model.language_model.",)])
def test_the_language_model_of_a_larger_one_has_the_weights_of_it_alone(
    tmp_path: Path, prefixes: tuple[str]
) -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"}
    alone = {**text, "head_dim": 4, "architectures": ["Gemma3ForCausalLM"]}
    config = EngineConfig(model=str(tmp_path / "alone"), dtype="float32")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/config.json").write_text(json.dumps(alone))
    model = make_plan(config).model
    tensors = random_tensors(model)
    write(tmp_path / "alone", tensors, **alone)
    whole = {name.replace("model.", prefixes[0], 1): tensor for name, tensor in tensors.items()} | {
        "vision_tower.a.weight": np.ones(3),
        "model.multi_modal_projector.b": np.ones(3),
    }
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole/model.safetensors")
    (tmp_path / "whole/config.json").write_text(
        json.dumps(GEMMA_4B | {"text_config": text | {"head_dim": 4}, "eos_token_id": 1})
    )
    assert len(load_file(tmp_path / "whole/model.safetensors")) == len(tensors) + 2
    sources = [CheckpointSource(str(tmp_path / name)) for name in ("alone", "whole")]
    read, theirs = (source._tensors(model) for source in sources)
    assert read.keys() == theirs.keys()
    assert all(np.array_equal(read[name].view()[:], theirs[name].view()[:]) for name in read)
    plan = make_plan(config.model_copy(update={"model": str(tmp_path / "whole")}))
    assert plan.model.info == model.info


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("mistral", "MistralForCausalLM"), ("ministral3", "Ministral3ForCausalLM")],
)
def test_a_larger_model_of_mistral_has_the_family_of_its_language_model(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"}
    text |= {"head_dim": 4, "sliding_window": None, "model_type": kind}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}

    def info_of(name: str, **config: Any) -> Any:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return make_plan(EngineConfig(model=str(tmp_path / name), dtype="float32")).model.info

    alone = info_of("alone", **text, architectures=[architecture])
    assert info_of("whole", **whole, text_config=text, vision_config={"hidden_size": 9}) == alone
    with pytest.raises(CheckpointError, match=r"text_config.model_type = 'llama'. Allowed: mistr"):
        info_of("other", **whole, text_config=text | {"model_type": "llama"})


@pytest.mark.parametrize("has_head", [True, False])
def test_a_larger_model_that_says_both_has_the_head_that_is_stored(
    tmp_path: Path, has_head: bool
) -> None:
    """transformers writes `tie_word_embeddings` twice, and ties what is not stored."""
    text = {"model_type": "mistral", "tie_word_embeddings": False}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    stored = {"language_model.lm_head.weight" if has_head else "a.weight": np.ones((2, 2))}
    save_file(stored, tmp_path / "model.safetensors")
    assert CheckpointSource(str(tmp_path)).config["tie_word_embeddings"] is not has_head


def test_a_family_that_is_not_served_is_refused_before_its_quantisation(tmp_path: Path) -> None:
    fields = {"architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "bnb"}}
    folder = write(tmp_path / "m", random_tensors(model_of()), **fields)
    with pytest.raises(CheckpointError, match="unknown architecture 'MambaForCausalLM'"):
        make_plan(EngineConfig(model=str(folder), dtype="float32"))
    served = write(tmp_path / "m", {}, quantization_config={"quant_method": "bnb"})
    with pytest.raises(CheckpointError, match="quant_method"):
        make_plan(EngineConfig(model=str(served), dtype="float32"))


@pytest.mark.parametrize("name", ["head_dim", "tie_word_embeddings", "vocab_size"])
def test_a_null_is_not_reported_as_a_missing_field(name: str) -> None:
    family = find_family(load_registry(), "Qwen3ForCausalLM")
    with pytest.raises(CheckpointError, match=f"config.json has {name} = null"):
        family.build(CONFIG | {name: None}, dtype="float32")


def test_an_empty_quantization_config_names_no_method() -> None:
    assert quantization_of({"quantization_config": None}) == "none"
    with pytest.raises(CheckpointError, match="quant_method"):
        quantization_of({"quantization_config": {}})
