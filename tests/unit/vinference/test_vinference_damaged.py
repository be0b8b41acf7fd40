"""Stored states that were damaged, or are another model's, are refused."""

from __future__ import annotations

import base64
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from enginebay.errors import InputError
from enginebay_vinference import SampleState, vInference
from tests.unit.vinference.small import TEXTS, encode
from tests.unit.vinference.test_vinference_state import GREEDY, make_state

pytestmark = pytest.mark.xdist_group("vinference")


def flip_bits(content: bytes, num_flips: int, seed: int, start: int = 0) -> list[bytes]:
    """Copies of `content`, each with one bit changed at or after byte `start`."""
    generator = np.random.default_rng(seed)
    made = []
    for bit in generator.integers(8 * start, 8 * len(content), num_flips).tolist():
        copy = bytearray(content)
        copy[bit // 8] ^= 1 << bit % 8
        made.append(bytes(copy))
    return made


def test_one_flipped_bit_anywhere_in_a_saved_state_is_found(tmp_path: Path) -> None:
    state = make_state(model_kwargs={"views": [{"key": jnp.ones((4, 32, 2, 8), jnp.bfloat16)}]})
    state.save(tmp_path / "state")
    whole = (tmp_path / "state").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    # A number that is another one afterwards is still a state that can be read.
    numbers = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 : header]
        for at in range(8, header)
        if whole[at] in b"0123456789"
    ]
    flipped = *flip_bits(whole, 200, 1, header), *flip_bits(whole[:header], 200, 2)
    for changed in (*flipped, *numbers):
        (tmp_path / "changed").write_bytes(changed + whole[len(changed) :])
        with pytest.raises(InputError):
            SampleState.load(tmp_path / "changed")


def test_one_flipped_bit_in_an_array_of_json_is_found() -> None:
    fields = make_state().to_dict()
    head = fields["sequences"]["$array"]
    for changed in flip_bits(base64.b64decode(head["base64"]), 20, 3):
        other = {
            **fields,
            "sequences": {"$array": {**head, "base64": base64.b64encode(changed).decode()}},
        }
        with pytest.raises(InputError, match="a damaged array"):
            SampleState.from_dict(other)
    for name, value in (("dtype", "float32"), ("shape", [3, 2]), ("crc32", None)):
        with pytest.raises(InputError, match="a damaged array"):
            SampleState.from_dict({**fields, "sequences": {"$array": {**head, name: value}}})


def test_states_without_checksums_are_refused_by_name(tmp_path: Path) -> None:
    metadata = {"format": "enginebay.tree.1", "tree": "{}"}
    save_file({"00000": np.zeros(3, np.uint8)}, tmp_path / "old", metadata=metadata)
    with pytest.raises(InputError, match="saved by an older version, without checksums"):
        SampleState.load(tmp_path / "old")
    fields = make_state().to_dict()
    del fields["sequences"]["$array"]["crc32"]
    with pytest.raises(InputError, match="without a checksum, written by an older version"):
        SampleState.from_dict(fields)


@pytest.mark.parametrize("wrong", [-1, 2048, 2**31 - 1])
def test_token_ids_of_a_state_are_checked_against_the_vocabulary(
    inference: vInference, wrong: int
) -> None:
    ids, mask = encode(inference, TEXTS[0])
    state = inference.init_state(ids, mask, sampling_params=GREEDY)
    sequences = np.array(state.sequences)
    sequences[np.asarray(state.model_kwargs["attention_mask"]) > 0] = wrong
    for other in (
        state.replace(sequences=sequences),
        state.replace(running_token=np.full((1, 1), wrong, np.int32)),
    ):
        with pytest.raises(InputError, match=f"token id {wrong}. Allowed: 0 to 2047"):
            inference.resume(other)
        with pytest.raises(InputError, match=f"token id {wrong}. Allowed: 0 to 2047"):
            inference.execute_prefill(other)
    assert not state.is_spent
