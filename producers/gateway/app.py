"""The gateway's ASGI application: routes, and one request from its first byte to its last.

Pure ASGI throughout: wrappers that buffer hide a client's leaving.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import sse
from .anthropic_request import parse_anthropic
from .dialects import CHAT, DIALECTS, Dialect, error_shape
from .errors import RequestError
from .gateway import Gateway, Request, body_digest
from .http import ClientGoneError, Presence, read_body, send_json, send_turn_stream, send_turn_whole
from .keys import KeyRing
from .models import Models
from .outcomes import Outcomes
from .reading import load_object

logger = logging.getLogger(__name__)

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
SESSION = "/s/{session:path}"
COUNTER = Callable[[str, int], None]
"""Told (API, status) of each request that has ended."""


class GatewayApp:
    """The application around one Gateway; `app` is for uvicorn."""

    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing,
        models: Models,
        outcomes: Outcomes,
        *,
        keepalive: float = 5.0,
        count: COUNTER = lambda api, status: None,
    ) -> None:
        """`keepalive`: seconds of silence after which a stream shows that it lives."""
        self._gateway, self._keys, self._models, self._outcomes = gateway, keys, models, outcomes
        self._keepalive, self._count = keepalive, count
        posts: dict[str, tuple[str, Handler]] = {d.path: (d.name, self._answering(d)) for d in DIALECTS}
        posts["/v1/messages/count_tokens"] = ("count_tokens", self._counting)
        routes = []
        for path, (api, handler) in posts.items():
            for prefix in ("", SESSION):
                routes.append(Route(prefix + path, _Guard(handler, api, count), methods=["POST"]))
        for prefix in ("", SESSION):
            routes.append(Route(f"{prefix}/v1/models", _Guard(self._list_models, "models", count)))
            routes.append(
                Route(f"{prefix}/v1/models/{{model:path}}", _Guard(self._one_model, "models", count))
            )
        for action, handler in (("feedback", self._feedback), ("finish", self._finish)):
            route = f"/rollouts/{{rollout_id}}/{action}"
            routes.append(Route(route, _Guard(handler, action, count), methods=["POST"]))
        routes.append(Route("/health", _Guard(self._health, "health", count)))
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def _answering(self, dialect: Dialect) -> Handler:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            caller = self._keys.caller(headers)
            body = await read_body(scope, receive, self._gateway.limits.body_bytes)
            call = dialect.parse(load_object(body))
            self._models.check(call.model)
            request = Request(
                dialect=dialect,
                call=call,
                caller=caller,
                headers=headers,
                session=scope["path_params"].get("session"),
                digest=body_digest(dialect.path, body),
            )
            served = await self._gateway.begin(request)
            presence = Presence(receive)
            try:
                with presence.watched():
                    writer = dialect.writer(served.head)
                    if call.stream:
                        await send_turn_stream(
                            send,
                            served.turn,
                            writer,
                            served.headers(),
                            presence,
                            keepalive=self._keepalive,
                            version=self._gateway.sampler.version,
                        )
                    else:
                        await send_turn_whole(send, served.turn, writer, served.headers(), presence)
                    served.delivered()
            finally:
                self._gateway.end(served)

        return handle

    async def _counting(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keys.caller(Headers(scope=scope))
        body = load_object(await read_body(scope, receive, self._gateway.limits.body_bytes))
        call = parse_anthropic(body, counting=True)
        self._models.check(call.model)
        await send_json(send, 200, {"input_tokens": self._gateway.count_tokens(call)})

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._keys.caller(headers)
        await send_json(send, 200, self._models.listed(anthropic="anthropic-version" in headers))

    async def _one_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._keys.caller(headers)
        name = scope["path_params"]["model"]
        self._models.check(name)
        await send_json(send, 200, self._models.one(name, anthropic="anthropic-version" in headers))

    async def _feedback(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._keys.caller(headers)
        body = load_object(await read_body(scope, receive, self._gateway.limits.body_bytes))
        rollout_id = scope["path_params"]["rollout_id"]
        feedback = await self._outcomes.send(rollout_id, body, headers.get("idempotency-key"))
        await send_json(send, 200, {"rollout_id": rollout_id, "feedback_id": feedback.feedback_id})

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._keys.caller(Headers(scope=scope))
        await read_body(scope, receive, self._gateway.limits.body_bytes)
        rollout_id = scope["path_params"]["rollout_id"]
        await send_json(send, 200, await self._outcomes.finish(rollout_id, caller.tenant))

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = self._gateway.sampler.ready
        facts = {
            "ready": ready,
            "version": self._gateway.sampler.version,
            "in_flight": self._gateway.in_flight,
        }
        await send_json(send, 200 if ready else 503, facts)


class _Guard:
    """One endpoint: whatever goes wrong in it has the API's own shape, and its status is counted."""

    def __init__(self, handler: Handler, api: str, count: COUNTER) -> None:
        self._handler, self._api, self._count = handler, api, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watching(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._handler(scope, receive, watching)
        except RequestError as e:
            await _refuse(scope, watching, e)
        except ClientGoneError:
            status = 499
        except Exception:
            logger.exception("a request broke api=%s", self._api)
            if not status:
                await _refuse(
                    scope, watching, RequestError("the gateway failed; its log says why", status=500)
                )
        finally:
            self._count(self._api, status)


async def _refuse(scope: Scope, send: Send, e: RequestError) -> None:
    await send_json(send, e.status, error_shape(scope["path"])(e), e.headers)


async def _http_error(request: HttpRequest, e: Exception) -> Response:
    """Starlette's own: no such path, wrong method."""
    assert isinstance(e, HTTPException)
    path = request.url.path
    known = ", ".join([CHAT.path, *(d.path for d in DIALECTS if d is not CHAT), "/v1/models"])
    what = {404: f"there is no {path} here; there are {known}", 405: f"{request.method} is not for {path}"}
    error = RequestError(what.get(e.status_code, str(e.detail)), status=e.status_code)
    body = sse.dumps(error_shape(path)(error))
    return Response(body, e.status_code, headers=dict(e.headers or {}), media_type="application/json")


def as_asgi(app: GatewayApp) -> ASGIApp:
    """For servers."""
    return app.app
