"""Programs that answer runs with another engine. They import nothing of enginebay, because they run
in an environment that has the other engine.
"""
