"""The executor that runs commands in this process: compiled steps over arrays on the device.

`local` runs each command, `runner` launches steps, `step`, `prefill` and `verify` are the pure step
functions, `device` is the state of the rows.
"""
