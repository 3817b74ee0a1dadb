"""What crosses a process boundary: records and their Arrow codec, the delta codec, topics, config, errors.

errors.py       the exception tree
topics.py       every topic: name, partitions, retention, size
codec.py        one record <-> one Arrow IPC stream, validated in full
trajectory.py task.py score.py sample.py feedback.py weights.py engine.py     the records
deadletter.py   the headers that a dead letter carries beside the original bytes
delta.py        weights: what changed between two versions, without loss
                update.py the decoded form · anchor.py all tensors · bitcodec.py one tensor's change · weight_hash.py
config.py       the configuration tree
"""
