"""The contract of an executor: commands, the keys of steps, the parts of an engine, and
where its arrays lie. `assemble` makes commands of plans.
"""
