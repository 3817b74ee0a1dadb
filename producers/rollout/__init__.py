"""tasks -> environment loop -> trajectories, admitted by capacity.

worker.py       the process: admission, rollouts, shutdown
followers.py    what it learns from the log
tasks.py        the task pool, in shuffled passes
admission.py    the ledger: how many rollouts may start
groups.py       a task -> the group its rollouts share
crew.py         the rollouts in flight
episode.py      one rollout
transcript.py   its token-exact record as it grows
tokenizing.py   text -> ids and back, untrusted text kept ordinary
engine_pool.py  which engine takes a turn, and retries
publisher.py    trajectories -> Kafka, acknowledged
clock.py        own clock against the broker's
"""
