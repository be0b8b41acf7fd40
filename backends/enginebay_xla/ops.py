"""The ops that come with enginebay: what is the same of all their implementations."""

from __future__ import annotations

from enginebay.ops.op import Op

attention = Op("attention")
embedding = Op("embedding")
kv_write = Op("kv_write")
linear = Op("linear")
rms_norm = Op("rms_norm")
rope = Op("rope")
sample = Op("sample")

add_rms_norm = Op("add_rms_norm", made_of=("rms_norm",))
rope_kv_write = Op("rope_kv_write", made_of=("rope", "kv_write"))
