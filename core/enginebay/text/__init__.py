"""Text on the host: the usual tokenizer, detokenising, chat templates, stop sequences, and the
worker processes with limits that run what strangers wrote. The contract of tokenizers is
`enginebay.contracts.text`.
"""
