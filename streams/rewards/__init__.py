"""Reward functions: what one is, the built-in ones, how a user's own is found and run.

base.py     the protocol, the view of a rollout, the result     load.py     by name: built in or `module:attr`
builtin.py  exact_match, numeric, calculator, addition          runner.py   inline, in a thread, with a time limit
"""
