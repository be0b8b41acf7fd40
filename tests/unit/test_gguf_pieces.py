"""The tokenizer of a GGUF file whose vocabulary has scores joins pieces by these scores."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from enginebay_models.gguf.header import read_gguf
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.tokenizer import build_tokenizer
from enginebay_models.gguf.vocabulary import read_vocabulary
from tests.gguf_files import letters

PIECES = ("x", "y", "z", "xy", "yz")


@pytest.mark.parametrize(
    ("scores", "pieces"), [((-1.0, -2.0), ["xy", "z"]), ((-2.0, -1.0), ["x", "yz"])]
)
def test_the_pair_with_the_highest_score_joins_first(
    tmp_path: Path, scores: tuple[float, float], pieces: list[str]
) -> None:
    own, path = letters(259), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(own.model)
    writer.add_token_list([*own.texts, *PIECES])
    writer.add_token_types([*own.types, *[1] * len(PIECES)])
    writer.add_token_scores([*[0.0] * len(own.texts), *[-9.0] * 3, *scores])
    writer.add_add_space_prefix(False)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = build_tokenizer(read_vocabulary(Metadata(read_gguf(path))))
    assert made.encode("xyz", add_special_tokens=False).tokens == pieces
