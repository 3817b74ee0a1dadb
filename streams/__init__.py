"""How records travel and what transforms them in flight.

    trajectories --verify--> scores --groups, advantage, staleness gate--> samples
         |                                                        ^
         +--> deadletters                 weights (version) ------+

    kafka.py       clients with the house settings      claims.py   large payloads by reference
    blobs.py       the object store                      metrics.py  every Prometheus object
    staleness.py   the one definition of lag             safe_faust.py  Faust without its losses

| stage     | consumes     | produces | waits for                    | unblocked by                   |
| verify    | trajectories | scores   | a reward function            | its result or its time limit   |
| advantage | scores       | samples  | the other members of a group | the last one, or the deadline  |
"""
