"""The fault zoo: faulty kernels, each one line of difference from a right one, and how many of them
a check finds.

Half A was written beside the cases; half B by others, who saw the contracts of the ops and right
kernels alone.
"""
