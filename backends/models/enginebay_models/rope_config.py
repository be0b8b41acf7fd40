"""Reads the rotary positions of config.json, and computes the frequencies for the length that an
engine serves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from enginebay.errors import CheckpointError
from enginebay.ops.rotary import RopeSpec, rope_frequencies
from enginebay_models.fields import MAX_SIZE, bad_field, is_number, number, positive

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
# The required and the optional parameters of each rule; all rules need rope_theta. `original` is
# read separately, because three fields may have it.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
ROPE_TYPES = tuple(sorted(_NEEDED))


@dataclasses.dataclass(frozen=True)
class RopeRules:
    """The rule of config.json, checked.

    `context` is max_position_embeddings. `original` is the context before the rule extends it, 0 if
    the rule has none. `values` has the other parameters of the rule by their names in config.json.
    """

    kind: str
    theta: float
    partial: float
    context: int
    original: float
    values: Mapping[str, Any]

    @property
    def max_model_len(self) -> int:
        """The longest context: max_position_embeddings, or the original context extended by the
        rule.
        """
        start = {"dynamic": self.context, "yarn": self.original, "longrope": self.original}.get(
            self.kind, 0
        )
        return max(self.context, int(min(start * self._factor(), MAX_SIZE)))

    @property
    def auto_max_model_len(self) -> int:
        """The longest context up to which frequencies do not depend on the length."""
        limit = {"dynamic": self.context, "longrope": int(self.original)}.get(
            self.kind, self.max_model_len
        )
        return max(1, min(limit, self.max_model_len))

    def spec(
        self, head_dim: int, max_model_len: int | None = None, *, partial: bool = False
    ) -> RopeSpec:
        """Return the rotary embedding of an engine that serves rows of `max_model_len` tokens.

        None is auto_max_model_len. dynamic and longrope choose their frequencies once, by that
        length. Without `partial` the plain rule rotates the whole head and ignores
        partial_rotary_factor, as transformers does for most families.
        """
        length = self.auto_max_model_len if max_model_len is None else max_model_len
        plain = self.kind == "proportional" or (self.kind == "default" and not partial)
        width = head_dim if plain else self._rotary_dim(head_dim)
        values: dict[str, Any] = {**self.values, "scaling": self.kind}
        match self.kind:
            case "dynamic":
                return RopeSpec(self._grown_theta(width, length), width)
            case "longrope":
                return RopeSpec(self.theta, width, "longrope", **self._longrope(width, length))
            case "proportional":
                return RopeSpec(
                    self.theta, width, "proportional", self._factor(), proportion=self.partial
                )
            case "yarn":
                values["factor"] = self._factor()
        if self.kind in _WITH_ORIGINAL:
            values[_ORIGINAL] = self.original
        return RopeSpec(self.theta, width, **values)

    def _rotary_dim(self, head_dim: int) -> int:
        width = int(head_dim * self.partial)
        if width < 2 or width % 2 or (self.kind == "dynamic" and width == 2):
            least = "4 or more" if self.kind == "dynamic" else "2 or more"
            allowed = (
                f"a share of head_dim = {head_dim} that is an even number of features, {least}"
            )
            raise bad_field(_PARTIAL, self.partial, allowed)
        return width

    def _factor(self) -> float:
        """Return the factor; without one, yarn and longrope take the ratio of the contexts."""
        factor = self.values.get("factor")
        if factor is None:
            return self.context / self.original if self.original else 1.0
        return float(factor)

    def _grown_theta(self, width: int, length: int) -> float:
        factor, length = self._factor(), max(length, self.context)
        growth = factor * length / self.context - (factor - 1)
        return float(self.theta * growth ** (width / (width - 2)))

    def _longrope(self, width: int, length: int) -> dict[str, Any]:
        name = "long_factor" if length > self.original else "short_factor"
        for listed in ("short_factor", "long_factor"):
            if len(self.values[listed]) != width // 2:
                given = f"a list of {len(self.values[listed])}"
                raise bad_field(listed, given, f"{width // 2} numbers, one per pair of features")
        scale, factor = self.values.get("attention_factor"), self._factor()
        if scale is None:
            scale = (
                1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original))
            )
        return {
            "frequency_divisors": tuple(map(float, self.values[name])),
            "attention_factor": scale,
        }


def read_rope(config: Mapping[str, Any]) -> RopeRules:
    """Read the rule from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    CheckpointError names a field that is missing, malformed or not supported, and the first field
    in which the two forms differ.
    """
    fields = [name for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None]
    for name in fields:
        if not isinstance(config[name], Mapping):
            raise bad_field(name, config[name], "an object with rope_type and its parameters")
    found = {name: _read(config, name) for name in fields if config[name]}
    if len(found) == 2:
        _refuse_contradiction(*found.values())
    return next(iter(found.values())) if found else _read(config, "rope_scaling")


def check_spec(spec: RopeSpec) -> None:
    """Raise CheckpointError when valid parameters together give no finite frequencies."""
    try:
        with np.errstate(all="ignore"):
            frequencies, scale = rope_frequencies(spec)
        usable = bool(np.isfinite(frequencies).all() and np.isfinite(scale))
    except (ArithmeticError, ValueError):
        usable = False
    if not usable:
        given = (
            f"the rotary parameters of config.json ({spec.scaling}, "
            f"rope_theta {spec.theta:g}) give no finite frequencies"
        )
        todo = "Correct the checkpoint's config.json, or choose another model."
        raise CheckpointError(given, "parameters of a trained model", todo)


def _refuse_contradiction(new: RopeRules, old: RopeRules) -> None:
    for field in dataclasses.fields(RopeRules):
        ours, theirs = getattr(new, field.name), getattr(old, field.name)
        if ours == theirs:
            continue
        name = {
            "kind": "rope_type",
            "theta": "rope_theta",
            "partial": _PARTIAL,
            "original": _ORIGINAL,
        }.get(field.name)
        if name is None:
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            ours, theirs = ours.get(name), theirs.get(name)
        given = (
            f"config.json has rope_parameters and rope_scaling with different {name} ({ours!r}, "
            f"{theirs!r})"
        )
        todo = "Remove the one that the model was not trained with from config.json."
        raise CheckpointError(given, "one of the two, or both with the same rule", todo)


def _read(config: Mapping[str, Any], field: str) -> RopeRules:
    rules = config.get(field) or {}
    kind = rules.get("rope_type", rules.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise bad_field(f"{field}.rope_type", kind, ", ".join(ROPE_TYPES))
    if nested := [name for name, value in rules.items() if isinstance(value, Mapping)]:
        raise bad_field(f"{field}.{nested[0]}", rules[nested[0]], "one rule for all layers")
    inside = "rope_theta" in rules
    theta = number(
        rules if inside else config,
        "rope_theta",
        10000.0,
        path=f"{field}.rope_theta" if inside else "",
    )
    context = positive(config, "max_position_embeddings")
    values = {}
    for name in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        absent = rules.get(name) is None
        if absent and name in _NEEDED[kind] and not (kind == "yarn" and name in rules):
            what = "lists" if kind == "longrope" else "a number"
            raise bad_field(f"{field}.{name}", None, f"{what}, which rope_type {kind!r} needs")
        if not absent:
            values[name] = _checked(f"{field}.{name}", rules[name])
        elif name == "truncate" and name in rules:
            raise bad_field(f"{field}.truncate", None, "true or false")
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        allowed = f"more than low_freq_factor = {values['low_freq_factor']}"
        raise bad_field(f"{field}.high_freq_factor", values["high_freq_factor"], allowed)
    original = _original(config, rules, field, context) if kind in _WITH_ORIGINAL else 0
    return RopeRules(kind, theta, _partial(config, rules, field), context, original, values)


def _original(
    config: Mapping[str, Any], rules: Mapping[str, Any], field: str, context: int
) -> float:
    """Read the original context.

    A field beside the rule wins over one inside the rule. Without either it is the whole context.
    """
    if _ORIGINAL in config:
        return number(config, _ORIGINAL, context)
    return number(rules, _ORIGINAL, context, path=f"{field}.{_ORIGINAL}")


def _partial(config: Mapping[str, Any], rules: Mapping[str, Any], field: str) -> float:
    path, value = _PARTIAL, config.get(_PARTIAL)
    if _PARTIAL in rules:
        path, value = f"{field}.{_PARTIAL}", rules[_PARTIAL]
    elif value is None:
        return 1.0
    if not is_number(value) or not 0 < value <= 1:
        raise bad_field(path, value, "a number above 0 and at most 1")
    return float(value)


def _checked(path: str, value: object) -> Any:
    """Return a parameter of a rule; CheckpointError for a wrong type or one that would give NaN."""
    name = path.rpartition(".")[2]
    if name == "truncate":
        if not isinstance(value, bool):
            raise bad_field(path, value, "true or false")
        return value
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, list) or not all(is_number(one) and one > 0 for one in value):
            raise bad_field(path, value, "a list of positive numbers")
        return value
    if not is_number(value) or value < 0 or (value == 0 and not name.startswith("mscale")):
        raise bad_field(path, value, "a positive number")
    return value
