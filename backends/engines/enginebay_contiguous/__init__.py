"""The contiguous engine, registered as "vinference": each row has one slot, whose size doubles as
it fills.
"""
