"""Layers that are alike are traced once, unless a kernel asks for the number of the layer. Nothing
is compiled.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.compose.binding import OpsBinder
from enginebay.compose.composition import make_plan
from enginebay.config import EngineConfig
from enginebay.config_sections import PHASES
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import LAYER, Caps
from enginebay.ops.spec import Bucket
from enginebay_xla.attention import CAPS, XlaAttention
from tests.unit.checkpoints import model_of, random_tensors, write

NUM_LAYERS = 5
BUCKET = Bucket(2, 2, 1, 1, 16, "decode")


@dataclasses.dataclass(frozen=True)
class WatchedAttention(XlaAttention):
    """Attention that notes the number of the layer at each of its calls, None without one."""

    name: str = "watched"
    caps: Caps = CAPS
    seen: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, *args: Any, layer: Any = None, **named: Any) -> Any:
        self.seen.append(layer)
        return super().__call__(*args, **named)


def calls(kernel: WatchedAttention, folder: Path) -> list[Any]:
    """What the kernel notes when a model of NUM_LAYERS equal layers is traced."""
    fields = {"num_hidden_layers": NUM_LAYERS}
    write(folder, random_tensors(model_of(**fields)), **fields)
    plan = make_plan(EngineConfig(model=str(folder), dtype="float32", compile_cache="off"))
    model, layout = plan.model, plan.kernels.layout_type(2, 16, 2, 4, "float32")
    chosen = dataclasses.replace(plan.kernels, attention=dict.fromkeys(PHASES, kernel))
    ops = OpsBinder(chosen, model.info, plan.placement)(BUCKET, {"full": layout})

    def step(weights: Any) -> Any:
        lens = jnp.array([3, 9])
        batch = derive_batch(jnp.ones(2, jnp.int32), lens, jnp.arange(2)[:, None], 16, BUCKET)
        cache = {"full": (layout.init(),) * NUM_LAYERS}
        batches = {"full": batch}
        return model.hidden(weights, ops.in_step(batches), jnp.zeros(2, int), cache, batches)[0]

    specs = model.weight_specs().items()
    weights = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in specs}
    assert jax.eval_shape(step, weights).shape == (2, 16)
    return kernel.seen


def test_layers_that_are_alike_are_traced_once(tmp_path: Path) -> None:
    seen = calls(WatchedAttention(), tmp_path)
    assert seen == [None, None], "the first layer adds no branch; the others are alike"


def test_a_kernel_that_asks_gets_the_number_of_each_layer(tmp_path: Path) -> None:
    kernel = WatchedAttention(caps=dataclasses.replace(CAPS, inputs={LAYER: ()}))
    assert calls(kernel, tmp_path) == list(range(NUM_LAYERS))
