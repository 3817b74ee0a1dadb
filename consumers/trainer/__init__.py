"""samples -> batch -> payloads by reference -> one optimizer step -> delta -> blob -> record and offsets in one transaction.

role.py         the process: opens everything in the order that makes a takeover safe
presence.py     who is at work for the policy
loop.py         the order of one version
source.py       samples topic -> builder.py (pure): batches, lag limit, repeats, offsets
payloads.py     samples -> trajectories, through refs.py: records by (partition, offset)
batch.py        rows -> padded micro-batches
step.py         micro-batches -> model.py (live bf16 values) -> loss.py -> master.py (fp32, AdamW)
emit.py         master -> bits.py -> this rank's blobs -> the record; shards.py: which rows those are
publish.py      record -> transaction; sample_list.py: what was trained, in the record or beside it
team.py         the ranks of one trainer; orders.py, follow.py: what rank 0 tells the others, and what they do then
checkpoint.py   what a restart needs; resume.py: which one, and the steps redone from history.py (the log)
report.py       metrics of a step; flops.py: what a step costs
warmstart.py    the demo's version 0
"""
