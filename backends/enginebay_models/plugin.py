"""What this package offers: model families, and checkpoints in Hugging Face's format as a source of
weights.
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl

_FAMILIES = {
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mpt": ("MptForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
}


@hookimpl
def register_models(register: Register) -> None:
    """The families, by the architectures that their checkpoints name."""
    for name, architectures in _FAMILIES.items():
        register(
            name,
            f"enginebay_models.{name}:family",
            summary=f"{', '.join(architectures)} in flax.nnx",
            capabilities={"architectures": architectures},
        )


@hookimpl
def register_quantizations(register: Register) -> None:
    """int8."""
    register("int8", "enginebay_models.int8:Int8", summary="a byte a value, a scale an output")


@hookimpl
def register_checkpoints(register: Register) -> None:
    """Folders, hub ids and the embedded demo model."""
    register(
        "huggingface",
        "enginebay_models.source:CheckpointSource",
        summary="a Hugging Face checkpoint: 'demo', a folder, or a hub id",
    )
