"""What each broker does and does not do, declared once: tests, `headrace doctor` and the stack read it here.

Every promise headrace makes is made on Apache Kafka. The embedded broker is for the demo and for quick tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BrokerKind = Literal["embedded", "kafka"]

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLimits:
    """One kind of broker. True and None are what a user may expect of Kafka."""

    kind: BrokerKind
    title: str
    durable_on_kill: bool
    """Acknowledged records and committed offsets survive kill -9 of the broker."""
    expires_dead_members: bool
    """A consumer that died without leaving loses its partitions after its session timeout."""
    max_workers: int | None
    """Faust workers in one group."""
    honours_fetch_limits: bool
    """A fetch returns no more than it asked for."""
    enforces_transaction_timeout: bool
    describes_cluster: bool
    max_data_bytes: int | None
    """Above this the broker gets slow; large payloads belong in the blob store."""

    def notes(self) -> list[str]:
        """The limits as sentences, for people; empty where there are none."""
        found = {
            "records of the last second may be lost when the broker is killed (kill -9)": self.durable_on_kill,
            "dead consumers are not expired: members are static": self.expires_dead_members,
            f"at most {self.max_workers} streams worker": self.max_workers is None,
            "a fetch may return a whole backlog at once": self.honours_fetch_limits,
            "transaction timeouts are not enforced": self.enforces_transaction_timeout,
            "describe_cluster is not answered": self.describes_cluster,
            f"meant for less than {(self.max_data_bytes or 0) // MIB} MiB of records": self.max_data_bytes
            is None,
        }
        return [text for text, fine in found.items() if not fine]


EMBEDDED = BrokerLimits(
    kind="embedded",
    title="the embedded broker (noida-db)",
    durable_on_kill=False,
    expires_dead_members=False,
    max_workers=1,
    honours_fetch_limits=False,
    enforces_transaction_timeout=False,
    describes_cluster=False,
    max_data_bytes=200 * MIB,
)
KAFKA = BrokerLimits(
    kind="kafka",
    title="Apache Kafka (one node)",
    durable_on_kill=True,
    expires_dead_members=True,
    max_workers=None,
    honours_fetch_limits=True,
    enforces_transaction_timeout=True,
    describes_cluster=True,
    max_data_bytes=None,
)
LIMITS: dict[BrokerKind, BrokerLimits] = {"embedded": EMBEDDED, "kafka": KAFKA}
