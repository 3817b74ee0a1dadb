"""What answers the policy between its turns.

base.py         the Environment protocol, and how one is found by name
calls.py        calls into one: a time limit, and a thread where one may block
single_turn.py  calculator.py     the built-in ones
"""
