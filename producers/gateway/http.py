"""The HTTP side of one request: its body within the limit, its client's leaving, and the answer's way out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zstandard
from starlette.types import Message, Receive, Scope, Send

from . import sse
from .answer import Event, Writer
from .errors import RequestError
from .turn import Turn


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body. RequestError 413 above `most` bytes."""
    too_large = RequestError(f"the body is larger than {most} bytes (gateway.max_body_bytes)", status=413)
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise too_large
        if not message.get("more_body", False):
            return _decoded(b"".join(parts), scope, most, too_large)


def _decoded(body: bytes, scope: Scope, most: int, too_large: RequestError) -> bytes:
    """A body that the client has compressed, as its bytes; never more than `most` of them."""
    kind = next(
        (v.decode("latin-1").lower() for n, v in scope["headers"] if n == b"content-encoding"), "identity"
    )
    try:
        if kind == "identity":
            return body
        if kind == "gzip":
            found = zlib.decompressobj(wbits=31).decompress(body, most + 1)
        elif kind == "zstd":
            found = zstandard.ZstdDecompressor().stream_reader(body).read(most + 1)
        else:
            raise RequestError(
                f"content-encoding {kind[:40]!r} is not supported; use gzip, zstd or none", status=415
            )
    except (zlib.error, zstandard.ZstdError) as e:
        raise RequestError(f"the body is not valid {kind}: {e}") from None
    if len(found) > most:
        raise too_large
    return found


async def send_whole(
    send: Send, status: int, body: bytes, headers: Mapping[str, str], media: str = "application/json"
) -> None:
    """A response in one piece."""
    found = {"content-type": media, "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _raw(found)})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, tree: Any, headers: Mapping[str, str] | None = None) -> None:
    """A JSON response."""
    await send_whole(send, status, sse.dumps(tree), headers or {})


class Presence:
    """Cancels the task that serves a client when the client goes, until `over`."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._serving = asyncio.current_task()
        self._watch = asyncio.get_running_loop().create_task(_disconnected(receive))
        self._watch.add_done_callback(self._left)

    def over(self) -> None:
        """The last byte is about to leave. ClientGoneError where nobody is there to read it."""
        self._watch.remove_done_callback(self._left)
        self._watch.cancel()
        if self.gone:
            raise ClientGoneError

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """ClientGoneError instead of the cancellation that the client's leaving caused."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.gone or task is None or task.uncancel():
                raise
            raise ClientGoneError from None
        finally:
            self._watch.remove_done_callback(self._left)
            self._watch.cancel()

    def _left(self, watch: asyncio.Task[Message]) -> None:
        if watch.cancelled() or watch.exception() is not None or self._serving is None:
            return
        self.gone = True
        self._serving.cancel()


async def _disconnected(receive: Receive) -> Message:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


async def send_turn_whole(
    send: Send, turn: Turn, writer: Writer, headers: Mapping[str, str], presence: Presence
) -> None:
    """Wait for the end of `turn` and send it as one JSON object. RequestError where it failed."""
    async with contextlib.aclosing(turn.follow()) as batches:
        async for _ in batches:
            pass
    body = sse.dumps(writer.whole(turn.answers, turn.usage))
    presence.over()
    await send_whole(send, 200, body, {**headers, **_version(turn)})


async def send_turn_stream(
    send: Send,
    turn: Turn,
    writer: Writer,
    headers: Mapping[str, str],
    presence: Presence,
    *,
    keepalive: float,
    version: int,
) -> None:
    """Send events as they come, and keep-alives in between. RequestError where it failed before the first byte.

    Nothing is sent before there is a token, or before `keepalive` seconds have passed: until then a failure still
    has its status code. `version`: the engines', told when the stream has to begin without a token.
    """
    begun = False

    async def more(make: Callable[[], bytes]) -> None:
        """Send what `make` writes, behind the beginning of the response where that is still to come."""
        nonlocal begun
        head = b""
        if not begun:
            begun = True
            told = _version(turn) or {"x-headrace-policy-version": str(version)}
            raw = _raw({**sse.HEADERS, **headers, **told})
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            head = writer.begin()
        if body := head + make():
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async with contextlib.aclosing(turn.follow(keepalive)) as batches:
        try:
            async for batch in batches:
                await more(functools.partial(_frames, writer, batch) if batch else writer.ping)
        except RequestError as e:
            if not begun:
                raise
            presence.over()
            await send({"type": "http.response.body", "body": writer.failed(e)})
            return
    await more(bytes)
    body = writer.end(turn.usage)
    presence.over()
    await send({"type": "http.response.body", "body": body})


def _frames(writer: Writer, batch: list[Event]) -> bytes:
    return b"".join(map(writer.event, batch))


def _version(turn: Turn) -> dict[str, str]:
    version = turn.version
    return {} if version is None else {"x-headrace-policy-version": str(version)}


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
