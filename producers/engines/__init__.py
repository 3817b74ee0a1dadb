"""Engines: token ids in; token ids, log-probabilities and version spans out; weights swapped in between.

protocol.py       what every engine is
transformers.py   the embedded engine, on transformers' continuous batching
scripted.py       deterministic tokens and log-probabilities, for tests
subscriber.py     weights topic -> stage, pause, apply, verify, resume
server.py         the protocol over HTTP on loopback;  client.py: the other end
"""
