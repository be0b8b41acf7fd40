"""Worker processes with limits: work that a stranger wrote, such as a chat template or a grammar,
runs in them. Packages that read strangers' programs import this one; the core does not.
"""
