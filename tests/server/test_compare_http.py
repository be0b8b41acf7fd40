"""enginebay compare with a server as a peer."""

from __future__ import annotations

import sys

from enginebay.config import make_config
from enginebay_bench.compare.records import Cell
from enginebay_bench.compare.session import compare
from enginebay_bench.compare.variants import engine_variant, peer_variant
from tests.server.process import ServerProcess

SIZES = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}


def test_a_server_is_compared_with_an_engine() -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    config = make_config({"model": "demo", "dtype": "float32", **SIZES})
    with ServerProcess("--warmup", "lazy", "--dtype", "float32", *flags) as server:
        peer = peer_variant(f"server={server.url}", config, "float32")
        found = compare([engine_variant("ours", config), peer], [Cell(1, 16, 8)], rounds=2)
    rows = {row.variant: row for row in found.rows}
    assert rows["server"].parity.verdict == "equal", rows["server"].parity.text
    assert rows["server"].other_work == ""
    assert rows["server"].rounds["ttft_ms"] > [0.0, 0.0]
    assert [row.variant for row in found.ranking(Cell(1, 16, 8))].count("server") == 1
    assert sys.executable in peer.command
