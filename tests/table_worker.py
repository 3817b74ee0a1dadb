"""A worker that writes a keyed fact per record into a Table and passes the record on; with our parts, or without.

Its changelog topic is made by admin, as ours are.
"""

from __future__ import annotations

_WORKER = """
import asyncio, logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
logging.getLogger("kafka").setLevel(logging.ERROR)
import faust
from kafka.admin import NewTopic
from kafka.errors import TopicAlreadyExistsError
from headrace.schemas.config_file import load_config
from headrace.schemas.topics import SAMPLES, TRAJECTORIES, Topics
from headrace.streams.app import _settings
from headrace.streams.holes import look_with
from headrace.streams.kafka import make_admin
from headrace.streams.outbox import Outbox
from headrace.streams.safe_faust import install
from headrace.streams.watchdog import WatchdogThread
from headrace.streams.worker import readings_of_consumer

SAFE = {safe}
config = load_config(Path(sys.argv[1]))
topics = Topics(config.run.namespace)
name = topics.group("table")
admin = make_admin(config.kafka)
try:
    admin.create_topics([NewTopic(f"{{name}}-facts-changelog", 4, 1, topic_configs={{"cleanup.policy": "compact"}})])
except TopicAlreadyExistsError:
    pass
admin.close()
settings = _settings(config, topics) | {{"producer_linger": 0}}
if not SAFE:
    del settings["TableManager"]
app = faust.App(name, **settings)
if SAFE:
    install(app, look_with(config.kafka))
outbox = Outbox(app)
facts = app.Table("facts", default=str, partitions=4)
raw = dict(key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
source = app.topic(topics.name(TRAJECTORIES), **raw)
sink = topics.name(SAMPLES, config.policy.id)

@app.agent(source, name="facts")
async def agent(stream):
    async for event in stream.noack().events():
        facts[event.value.decode()] = "seen"
        await (await outbox.send(sink, event.key, event.value, []))
        event.ack()

async def main():
    import signal
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    dog = WatchdogThread(config.kafka, lambda ends: readings_of_consumer(app, config.streams.watchdog_seconds, ends))
    if SAFE:
        dog.start()
    starting = asyncio.ensure_future(app.start())
    stopping = asyncio.ensure_future(stop.wait())
    while not stopping.done() and not app.crashed:
        if starting.done():
            starting.result()
        await asyncio.wait({{stopping}}, timeout=0.5)
    dog.stop()
    os._exit(1 if app.crashed else 0)

asyncio.run(main())
"""

SAFE = _WORKER.format(safe=True)
PLAIN = _WORKER.format(safe=False)
