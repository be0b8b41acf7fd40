"""From logits to tokens: greedy and standard sampling."""
