"""The fields of adapter_config.json: those that are read, those that change nothing at inference,
and the values of the others that a plain LoRA has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from enginebay.errors import CheckpointError, shown, shown_text

READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"ensure_weight_tying"}
)
"""Fields whose every value is checked and used where the adapter is read."""

NEUTRAL = frozenset(
    {
        # What the adapter was made from and with.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version"),
        *("revision", "task_type"),
        # Which layers have matrices: the tensors of the file say the same.
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        # Used in training only: dropout, a backward pass, and the settings of first values.
        *("lora_dropout", "runtime_config", "velora_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
        # Settings of features that other fields switch on, and of a merge while training.
        *("megatron_core", "merge_weights", "qalora_group_size"),
    }
)
"""Fields that change no logits, whatever they hold."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "enable_lora": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
}
"""Fields that change the model in a way that slots cannot hold, with the values that do not."""

_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga")
"""Values of init_lora_weights with which PEFT also changes the weights of the base model."""

FIELDS = READ | NEUTRAL | PLAIN.keys()


def wrong(given: str, allowed: str, todo: str = "") -> CheckpointError:
    """Return the error for an adapter that cannot be used."""
    usual = "Pass an adapter that was trained for this model, or fetch its files again."
    return CheckpointError(f"the adapter cannot be used: {given}", allowed, todo or usual)


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError, which names the field, for a field with a value other than those of a
    plain LoRA, and for an unknown field that holds anything but null, false or an empty value.
    """
    for field, value in config.items():
        if field in PLAIN:
            _check_plain(field, value)
        elif field not in FIELDS and not _is_one_of(value, (None, False, "", [], {})):
            raise wrong(
                f"{shown_text(field, 60)} = {shown(value)}, a field that is not known here",
                "the fields of PEFT's LoraConfig that this version knows",
                "Merge the adapter into the weights of the model with PEFT, if the field changes "
                "the model; remove the field from adapter_config.json if it does not.",
            )


def _check_plain(field: str, value: Any) -> None:
    plain = PLAIN[field]
    if _is_one_of(value, plain):
        return
    todo = "Train an adapter without it, or merge it into the weights of the model."
    if field == "init_lora_weights" and isinstance(value, str) and _CHANGES_BASE.fullmatch(value):
        todo = (
            "The training has changed the base model too, so the adapter does not fit the "
            "unchanged model. Convert it: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...) of PEFT writes a plain LoRA."
        )
    several = field == "init_lora_weights"
    allowed = ", ".join(map(repr, plain)) if several else f"{field} = {plain[0]!r}"
    raise wrong(f"{field} = {shown(value)}", allowed, todo)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a JSON value is one of `allowed`; 0 is not false and 1 is not true."""
    return any(type(value) is type(one) and value == one for one in allowed)
