"""Reward functions: what one is, the built-in ones, how a user's own is found and run.

base.py          the protocol, the view of a rollout, the result    load.py      by name: built in or `module:attr`
builtin.py       exact_match, numeric, calculator, addition         runner.py    built-in ones: inline, in a thread, async
builtin_text.py  regex, json_schema                                 pool.py      a user's own, in confined processes
code_tests.py    python_tests, in code_child.py                     host.py      such a process
judge.py         llm_judge                                          scratch.py   the folders they may write to
composed.py      composed: a weighted sum of others                 args.py      arguments, checked by name
"""
