"""StepEngine: an engine made of a ledger, step sizes and an executor."""
