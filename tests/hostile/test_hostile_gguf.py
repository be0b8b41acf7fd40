"""Untrusted GGUF files: damaged headers, counts beyond the file, metadata of wrong types."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from enginebay.compose.composition import find_family
from enginebay.errors import CheckpointError
from enginebay.plugins.registry import Registry, load_registry
from enginebay.weights import WeightFormat
from enginebay_models.gguf.header import read_gguf
from enginebay_models.gguf.source import GgufSource
from enginebay_testing.model_harness import random_tensor
from tests.gguf_files import letters, write_gguf
from tests.hostile.inputs import few_or_all, hold

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
COUNTS = (0, 1, 2, 2**16, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
MAX_BYTES = 8 << 20


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    registry = load_registry()
    model = find_family(registry, "LlamaForCausalLM").build(CONFIG, dtype="float32")
    tensors = {
        name: random_tensor(name, shape, 1)
        for source in model.tensor_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    path = tmp_path_factory.mktemp("hostile") / "model.gguf"
    return write_gguf(path, CONFIG, tensors, letters(264), "Q8_0").read_bytes()


def first_tensor(content: bytes) -> int:
    """The first byte after the header, more or less."""
    return content.index(b"blk.0.ffn_down.weight") + 60


CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(COUNTS).map(lambda count: struct.pack("<Q", count))
        | st.integers(0, 255).map(lambda value: bytes([value]))
        | st.integers(0, 40).map(lambda kind: struct.pack("<I", kind))
        | st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=4,
)
LENGTHS = st.just(1.0) | st.floats(0, 1)


def test_a_file_that_ends_within_its_header(tmp_path: Path, content: bytes) -> None:
    path, last = tmp_path / "model.gguf", first_tensor(content)
    for length in {*range(64), *range(64, last, last // 80)}:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_gguf(path)


@few_or_all(60, 3000)
def test_damaged_files(tmp_path: Path, content: bytes, registry: Registry, count: int) -> None:
    """A third of the changes are in the keys before the tokens, where they matter most."""
    path, last = tmp_path / "model.gguf", first_tensor(content)
    early = content.index(b"tokenizer.ggml.tokens")

    def load(change: tuple[list[tuple[float, bytes]], float, bool]) -> None:
        places, length, is_early = change
        made = bytearray(content)
        for share, value in places:
            at = int(share * (early if is_early else last))
            made[at : at + len(value)] = value
        path.write_bytes(bytes(made[: int(length * len(made))]))
        source = GgufSource(str(path))
        if 20 < source.config["num_hidden_layers"] <= 1000:
            return  # a size that is served, and takes a second to make
        model = find_family(registry, source.architecture).build(source.config, dtype="float32")
        source.load_tokenizer().encode("Once upon")
        form = WeightFormat("float32", source.quantized_weights(model), source.quantization)
        source.load_weights(model, form=form, place=lambda *_: None)

    assert hold(st.tuples(CHANGES, LENGTHS, st.booleans()), load, count) > count // 3


def with_number(content: bytes, at: int, number: int) -> bytes:
    return content[:at] + struct.pack("<Q", number) + content[at + 8 :]


@pytest.mark.parametrize("number", [2**24, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    ("after", "skip"),
    [(b"GGUF", 4), (b"GGUF", 12), (b"tokenizer.ggml.tokens", 8), (b"tokenizer.ggml.scores", 8),
     (b"general.architecture", 4), (b"token_embd.weight", 4), (b"token_embd.weight", 24)],
    ids=["tensors", "metadata", "tokens", "scores", "text", "size", "offset"],
)  # fmt: skip
def test_counts_beyond_the_file_take_no_memory(
    tmp_path: Path, content: bytes, number: int, after: bytes, skip: int
) -> None:
    """Numbers of tensors, of metadata and of items, lengths of texts, sizes and offsets."""
    path = tmp_path / "model.gguf"
    path.write_bytes(with_number(content, content.index(after) + len(after) + skip, number))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_gguf(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MAX_BYTES


def test_tensors_in_the_same_bytes_are_named_with_their_types(
    tmp_path: Path, content: bytes
) -> None:
    name = b"blk.0.ffn_up.weight"
    offset = content.index(name) + len(name) + 4 + 16 + 4
    path = tmp_path / "model.gguf"
    (before,) = struct.unpack_from("<Q", content, offset)
    path.write_bytes(with_number(content, offset, before - 32))
    with pytest.raises(CheckpointError, match=r"\(Q8_0\) and 'blk.0.ffn_up.weight' \(Q8_0\)"):
        read_gguf(path)


def test_a_tensor_with_the_type_of_another_is_named(tmp_path: Path, content: bytes) -> None:
    """Bytes of Q8_0 that the header calls Q4_0 leave half of them over."""
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 16
    path = tmp_path / "model.gguf"
    assert content[place] == 8
    path.write_bytes(content[:place] + struct.pack("<I", 2) + content[place + 4 :])
    with pytest.raises(CheckpointError, match=r"bytes between .*'blk.0.ffn_up.weight' \(Q4_0\)"):
        read_gguf(path)


def test_another_version_and_byte_order_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    for version, why in ((1, "version 1"), (9, "version 9"), (3 << 24, "version 3 in big-endian")):
        path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        with pytest.raises(CheckpointError, match=why):
            read_gguf(path)
    assert np.frombuffer(content, "<u4", 1, 4)[0] == 3
