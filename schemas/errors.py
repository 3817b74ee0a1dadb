"""The exception tree.

    HeadraceError
      ConfigError            (ValueError)   the user's configuration or files; the message says how to mend it
      InvalidMessageError    (ValueError)   a record that cannot be used -> dead letter with `reason`
      BrokerError                           Kafka refused or is not as expected
        BrokerUnreachableError              nothing answers at the bootstrap address
      BlobError                             the object store
        BlobNotFoundError
        BlobCorruptError                    size or hash differs from what the record says
        BlobNameError                       not a plain path under the store's root
        BlobUnavailableError                the store does not answer, or says that it cannot now: try again later
      WeightUpdateError                     an update that must not be applied, with `reason`
      EngineError                           the engine cannot serve this request
        EnginePoisonedError                 its weights are torn; it serves nothing until it has reloaded
      FencedError                           another trainer writes for this policy
      RewardError                           a reward function broke; `reason` says how

A bad record is data, not a crash: only the outermost loop of a role turns an unknown exception into an exit.
"""


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """What the user configured cannot work. Shown without a traceback."""


class InvalidMessageError(HeadraceError, ValueError):
    """A record that no stage can use.

    `reason` is a short word from a closed set per stage (a metric label); `detail` is for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class BrokerError(HeadraceError):
    """Kafka refused a request or is not set up as headrace needs it."""


class BrokerUnreachableError(BrokerError):
    """Nothing answers at the bootstrap address."""


class BlobError(HeadraceError):
    """The object store failed."""


class BlobNotFoundError(BlobError):
    """The blob that a record points to does not exist (retention, or the wrong store)."""


class BlobCorruptError(BlobError):
    """The blob's size or hash differs from what the record says."""


class BlobNameError(BlobError):
    """A blob name that is not a plain path under the store's root."""


class BlobUnavailableError(BlobError):
    """The object store does not answer, or says that it cannot now (5xx, throttling): the blob may well be there."""


class WeightUpdateError(HeadraceError):
    """A weight update that must not be applied. `reason` is a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class EngineError(HeadraceError):
    """The engine cannot serve this request."""


class EnginePoisonedError(EngineError):
    """The engine's weights are torn: it serves nothing until it has reloaded an anchor."""


class FencedError(HeadraceError):
    """Another trainer has taken over this policy; this one must end."""


class TeamError(HeadraceError):
    """A trainer that is spread over processes cannot go on: another rank failed or is gone."""


class RewardError(HeadraceError):
    """A reward function broke. `reason` becomes the score's void reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
