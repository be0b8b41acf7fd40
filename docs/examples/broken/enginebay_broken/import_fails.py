"""A plugin whose module cannot be imported."""

import enginebay_broken.a_module_that_nobody_wrote  # noqa: F401
