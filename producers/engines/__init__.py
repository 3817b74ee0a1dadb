"""Engines: token ids in; token ids, log-probabilities and version spans out; weights swapped in between.

protocol.py       what every engine is;  spans.py: which version sampled which token
transformers.py   the embedded engine, on transformers' continuous batching
                  batching.py its loop, with a pause · attention.py sampling.py in it · live_weights.py the parameters
scripted.py       deterministic tokens and log-probabilities, for tests
subscriber.py     weights topic -> stage, pause, apply, verify, resume;  follower.py: what to load next
server.py         the protocol over HTTP on loopback;  client.py: the other end;  wire.py: the messages
role.py           the process: engine, server and subscriber;  feed.py: its topics
"""
