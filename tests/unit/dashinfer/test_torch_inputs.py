"""Tensors of torch as token ids and as embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from enginebay_dashinfer.allspark import Engine, MultiMediaInfo
from enginebay_dashinfer.sampling import to_sampling
from tests.unit.dashinfer.conftest import SUCCESS, greedy
from tests.unit.dashinfer.test_life_cycle import tokens_of

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="make env-parity installs torch")


# holds D10
def test_a_tensor_starts_the_request_of_its_list(running: Engine) -> None:
    expected = tokens_of(running, [5, 6, 7], max_length=20)
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([5, 6, 7], dtype=dtype)
        status, handle, results = running.start_request_ids("one", None, ids, greedy(max_length=20))
        assert status is SUCCESS, running.last_error
        assert running.sync_request("one", handle) is SUCCESS
        assert results.Get().ids_from_generate == expected
    for wrong in (torch.tensor([[5, 6]]), torch.tensor([0.5]), torch.tensor(5)):
        with pytest.raises(ValueError, match="one dimension"):
            running.start_request_ids("one", None, wrong, greedy())
    capsule = torch.utils.dlpack.to_dlpack(torch.tensor([[5, 6, 7]], dtype=torch.int32))
    fields = {"max_length": 20, "temperature": 0.0, "early_stopping": False}
    status, handle, results = running.start_request("one", {"input_ids": capsule}, fields)
    assert status is SUCCESS, running.last_error
    assert running.sync_request("one", handle) is SUCCESS
    assert results.Get().ids_from_generate == expected


# holds D18
def test_capsules_and_tensors_are_embeddings() -> None:
    rows = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    for given in (rows, torch.utils.dlpack.to_dlpack(rows)):
        media = MultiMediaInfo()
        assert media.add_multimedia_content("9", [given]) is SUCCESS
        assert to_sampling({"mm_info": media}, 3, 9).media is media
        (found,) = media.segments([9, 9]).segments
        np.testing.assert_array_equal(np.asarray(found), rows.numpy())
