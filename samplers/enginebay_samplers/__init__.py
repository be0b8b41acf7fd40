"""Samplers, logits processors, grammars and proposers."""
