"""Worker processes with limits, for work that untrusted authors wrote, such as chat templates and
grammars. Packages that run such programs import this package; the core does not.
"""
