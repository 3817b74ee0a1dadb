"""`headrace bench`: figures of speed and size, each beside a yardstick measured in the same run.

streams.py  the processors beside a bare pass-through    passthrough.py  that pass-through    thin.py  the records
"""
