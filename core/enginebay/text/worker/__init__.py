"""Worker processes with limits, for work that untrusted authors wrote, such as chat templates and
grammars.
"""
