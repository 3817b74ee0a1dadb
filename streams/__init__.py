"""How records travel and what transforms them in flight.

    trajectories --verify--> scores --groups, advantage, staleness gate--> samples
         |                                                        ^
         +--> deadletters                 weights (version) ------+

    app.py         the Faust app          worker.py     the role           watchdog.py  ends what stands still
    safe_faust.py  Faust without losses   outbox.py     sends, then acks   deadletters.py
    verify.py      the verify stage       verdicts.py   trajectory -> score            rewards/
    advantage.py   the advantage stage    groups.py     when a group closes   recall.py  after a restart
    fates.py       group -> samples       estimators.py advantages            gate.py    what is too old
    kafka.py       clients                blobs.py      the object store      claims.py  payloads by reference
    metrics.py     every metric           staleness.py  the definition of lag

| stage     | consumes     | produces | waits for                    | unblocked by                   |
| verify    | trajectories | scores   | a reward function            | its result or its time limit   |
| advantage | scores       | samples  | the other members of a group | the last one, or the deadline  |
"""
