"""An example reward: 1.0 for the wanted word, a little for mentioning it.

A reward function takes a rollout and returns a number, or a dict with `reward` and further named numbers. It
may be async. An exception voids the rollout (it is not trained): raise for broken infrastructure, and return
`RewardResult.failure("why")` when the policy did something that cannot be scored.
"""

from headrace.streams.rewards.base import RewardResult, RolloutView


def score(rollout: RolloutView) -> float | RewardResult:
    """`rollout.metadata` is the task's; `rollout.answer` the last thing the model wrote."""
    wanted = str(rollout.metadata["wanted"]).lower()
    answer = rollout.answer.lower()
    if not answer.strip():
        return RewardResult.failure("empty")
    if answer.split()[0].strip(".,!") == wanted:
        return 1.0
    return 0.2 if wanted in answer else 0.0
