"""Text on the host: the usual tokenizer, detokenising, chat templates, stop sequences, and the
worker processes with limits that run untrusted code. The contract of tokenizers is
`enginebay.contracts.text`.
"""

from __future__ import annotations

from enginebay.on_demand import on_demand

# `enginebay.text` was the contract of tokenizers.
__getattr__, __dir__ = on_demand(__name__, {"enginebay.contracts.text": "Tokenizer"})
