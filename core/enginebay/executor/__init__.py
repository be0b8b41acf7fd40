"""The executor contract: commands, the keys of compiled steps, the parts of an engine, the
placement of arrays.
"""
