"""What answers the policy between its turns.

base.py         the Environment protocol, and how one is found by name
single_turn.py  calculator.py     the built-in ones
"""
