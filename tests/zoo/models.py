"""Faulty model families: rows see one another, padding counts, chunks differ, and declarations do
not agree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.model import Model, ModelFamily, TensorSource
from enginebay.weights import WeightSpec
from enginebay_models.llama import LlamaFamily
from enginebay_testing.models import model_checks
from tests.parity.ops import plain_ops

Check = tuple[str, Callable[[], None]]
Change = Callable[[Model], Any]


class Changed(LlamaFamily):
    """Llama, whose models are changed after they are built."""

    def __init__(self, change: Callable[[Model], None]) -> None:
        self._change = change

    def build(self, *args: Any, **kwargs: Any) -> Model:
        model = super().build(*args, **kwargs)
        self._change(model)
        return model


def hidden_after(change: Callable[..., jax.Array]) -> Callable[[Model], None]:
    """Changes final hidden states by change(hidden, token_ids, batch)."""

    def apply(model: Model) -> None:
        hidden = model.hidden

        def changed(weights: Any, ops: Any, token_ids: jax.Array, cache: Any, batches: Any) -> Any:
            out, after = hidden(weights, ops, token_ids, cache, batches)
            return change(out, token_ids, next(iter(batches.values()))), after

        model.hidden = changed  # type: ignore[method-assign]

    return apply


def ids_before(change: Callable[..., jax.Array]) -> Callable[[Model], None]:
    """Changes token ids by change(token_ids, batch) before anything is computed."""

    def apply(model: Model) -> None:
        hidden = model.hidden

        def changed(weights: Any, ops: Any, token_ids: jax.Array, cache: Any, batches: Any) -> Any:
            ids = change(token_ids, next(iter(batches.values())))
            return hidden(weights, ops, ids, cache, batches)

        model.hidden = changed  # type: ignore[method-assign]

    return apply


def without_cache(model: Model) -> None:
    """The cache comes back as it went."""
    hidden = model.hidden

    def changed(weights: Any, ops: Any, token_ids: jax.Array, cache: Any, batches: Any) -> Any:
        out, _ = hidden(weights, ops, token_ids, cache, batches)
        return out, {name: tuple(layers) for name, layers in cache.items()}

    model.hidden = changed  # type: ignore[method-assign]


def logits_by(change: Callable[[jax.Array], jax.Array]) -> Callable[[Model], None]:
    """Changes logits."""

    def apply(model: Model) -> None:
        logits = model.logits
        model.logits = lambda *args: change(logits(*args))  # type: ignore[method-assign]

    return apply


def specs_by(change: Callable[[WeightSpec], WeightSpec]) -> Callable[[Model], None]:
    """Changes what is declared of weights."""

    def apply(model: Model) -> None:
        specs = model.weight_specs()
        model.weight_specs = lambda: {  # type: ignore[method-assign]
            path: change(spec) for path, spec in specs.items()
        }

    return apply


def sources_by(
    change: Callable[[dict[str, TensorSource]], Mapping[str, TensorSource]],
) -> Callable[[Model], None]:
    """Changes where weights come from."""

    def apply(model: Model) -> None:
        sources = dict(change(model.tensor_sources()))
        model.tensor_sources = lambda: sources  # type: ignore[method-assign]

    return apply


def info_by(**fields: Any) -> Callable[[Model], None]:
    """Changes what is said of the model."""

    def apply(model: Model) -> None:
        model.info = dataclasses.replace(model.info, **fields)

    return apply


def one_group_too_wide(model: Model) -> None:
    """The cache group has twice the KV heads of the attention."""
    (group,) = model.info.groups
    model.info = dataclasses.replace(
        model.info, groups=(dataclasses.replace(group, num_kv_heads=2 * group.num_kv_heads),)
    )


def whole(source: TensorSource) -> TensorSource:
    """Builds the whole weight, whatever part is wanted."""
    return dataclasses.replace(
        source, build=lambda readers, index: source.build(readers, (slice(None),) * len(index))
    )


def twice(sources: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """A checkpoint tensor is behind two weights of one shape."""
    by_shape: dict[Any, str] = {}
    for path, source in sources.items():
        other = by_shape.setdefault(source.shapes, path)
        if other != path:
            return sources | {path: sources[other]}
    return sources


def lost(sources: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """The last weight has no source."""
    return dict(list(sources.items())[:-1])


FAULTS: dict[str, ModelFamily] = {
    "adds the mean of all tokens": Changed(
        hidden_after(lambda out, *_: out + 1e-2 * out.mean(axis=0))
    ),
    "adds the largest token id": Changed(
        hidden_after(lambda out, ids, _: out + 1e-3 * ids.max().astype(out.dtype))
    ),
    "adds the number of rows": Changed(
        hidden_after(
            lambda out, _, batch: out * (1 + 1e-3 * (batch.kv_lens > 0).sum()).astype(out.dtype)
        )
    ),
    "adds the place in the step": Changed(
        hidden_after(
            lambda out, ids, _: out * (1 + 1e-3 * jnp.arange(len(ids)))[:, None].astype(out.dtype)
        )
    ),
    "adds the length of the chunk": Changed(
        hidden_after(
            lambda out, _, batch: (
                out
                * (1 + 1e-3 * jnp.pad(batch.q_lens, (0, 1))[batch.seq_ids])[:, None].astype(
                    out.dtype
                )
            )
        )
    ),
    "reads the token after": Changed(ids_before(lambda ids, _: jnp.roll(ids, -1))),
    "loses the cache": Changed(without_cache),
    "logits of bfloat16": Changed(logits_by(lambda logits: logits.astype(jnp.bfloat16))),
    "logits without the last token": Changed(logits_by(lambda logits: logits[:, :-1])),
    "a shape too many": Changed(
        specs_by(lambda spec: dataclasses.replace(spec, axes=(*spec.axes, None)))
    ),
    "an unknown axis": Changed(
        specs_by(lambda spec: dataclasses.replace(spec, axes=("colour", *spec.axes[1:])))
    ),
    "whole weights for parts": Changed(
        sources_by(lambda all_: {p: whole(s) for p, s in all_.items()})
    ),
    "a tensor twice": Changed(sources_by(twice)),
    "a weight without a source": Changed(sources_by(lost)),
    "another family's name": Changed(info_by(family="other")),
    "a group too wide": Changed(one_group_too_wide),
}

RIGHT: dict[str, ModelFamily] = {"llama": LlamaFamily()}


def checks(part: ModelFamily) -> Iterable[Check]:
    """The kit's suite, with ops in plain JAX."""
    return model_checks(part, functools.partial(plain_ops))
