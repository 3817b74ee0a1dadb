"""The yardstick: read records in a consumer group with aiokafka, send them on unchanged, commit; nothing else.

python -m headrace.deploy.bench.passthrough BOOTSTRAP SOURCE TARGET COUNT
"""

from __future__ import annotations

import asyncio
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from ...streams.kafka import MAX_REQUEST

BATCH = 500


async def pass_through(bootstrap: str, source: str, target: str, count: int) -> None:
    """Send `count` records on; a batch is committed when the broker has all of it (acks=all)."""
    consumer = AIOKafkaConsumer(
        source,
        bootstrap_servers=bootstrap,
        group_id=f"{target}-group",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=MAX_REQUEST,
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        compression_type="zstd",
        linger_ms=0,
        max_batch_size=256 * 1024,
        max_request_size=MAX_REQUEST,
    )
    await consumer.start()
    await producer.start()
    done = 0
    try:
        while done < count:
            found = await consumer.getmany(timeout_ms=200, max_records=BATCH)
            sent = [
                await producer.send(target, r.value, key=r.key, headers=list(r.headers))
                for batch in found.values()
                for r in batch
            ]
            if sent:
                await asyncio.gather(*sent)
                await consumer.commit()
                done += len(sent)
    finally:
        await producer.stop()
        await consumer.stop()


def main() -> int:
    """Run with the arguments of the command line."""
    bootstrap, source, target, count = sys.argv[1:]
    asyncio.run(pass_through(bootstrap, source, target, int(count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
