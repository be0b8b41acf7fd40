"""LoRA: adapters of low rank that requests choose by name, several of them in one batch."""
