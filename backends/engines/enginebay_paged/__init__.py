"""The paged engine, registered as "oengine": rows hold pages of one pool and share the pages of
equal prefixes, in the memory of the device, of the host, and on disk.
"""
