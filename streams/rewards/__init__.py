"""Reward functions by name: built-in ones and `module:attr` plug-ins."""
