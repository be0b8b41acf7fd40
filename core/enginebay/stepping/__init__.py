"""StepEngine, the engine of a ledger, a geometry and an executor, and the sizes of its steps."""
