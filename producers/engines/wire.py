"""The engine's HTTP messages: JSON in, one JSON line per finished request out.

POST /generate {"requests": [{request_id, token_ids, max_tokens, stop_token_ids, temperature, top_p, top_k}]}
  -> {"request_id", "token_ids", "logprobs", "version_spans": [[version, start, end]], "finish_reason"}
   | {"request_id", "error", "poisoned"}
POST /abort {"request_ids": [...]}     GET /health     GET /info
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ...schemas.errors import EngineError, EnginePoisonedError
from .protocol import GenerateRequest, GenerateResult, VersionSpan


def dump_requests(requests: Iterable[tuple[str, GenerateRequest]]) -> bytes:
    """The body of /generate; each request under the id it has on the wire."""
    items = [
        {
            "request_id": wire_id,
            "token_ids": r.token_ids,
            "max_tokens": r.max_tokens,
            "stop_token_ids": r.stop_token_ids,
            "temperature": r.temperature,
            "top_p": r.top_p,
            "top_k": r.top_k,
        }
        for wire_id, r in requests
    ]
    return json.dumps({"requests": items}, separators=(",", ":")).encode()


def load_requests(body: bytes) -> list[GenerateRequest]:
    """The requests in a body of /generate. Raises ValueError that says what is wrong."""
    try:
        tree = json.loads(body)
        return [_request(item) for item in tree["requests"]]
    except KeyError as e:
        raise ValueError(f"{e.args[0]!r} is missing") from None
    except (TypeError, AttributeError) as e:
        raise ValueError(f"a value of the wrong type: {e}") from None


def dump_result(result: GenerateResult) -> bytes:
    """One line."""
    return _line(
        {
            "request_id": result.request_id,
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "version_spans": [(s.version, s.start, s.end) for s in result.version_spans],
            "finish_reason": result.finish_reason,
        }
    )


def dump_error(request_id: str, error: EngineError) -> bytes:
    """One line."""
    poisoned = isinstance(error, EnginePoisonedError)
    return _line({"request_id": request_id, "error": str(error), "poisoned": poisoned})


def load_line(line: bytes) -> tuple[str, GenerateResult | EngineError]:
    """The id on the wire and the outcome. Raises EngineError for a line that is neither."""
    try:
        item = json.loads(line)
        wire_id = item["request_id"]
        if "error" in item:
            kind = EnginePoisonedError if item["poisoned"] else EngineError
            return wire_id, kind(item["error"])
        return wire_id, GenerateResult(
            request_id=wire_id,
            token_ids=tuple(item["token_ids"]),
            logprobs=tuple(item["logprobs"]),
            version_spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in item["version_spans"]),
            finish_reason=item["finish_reason"],
        )
    except (ValueError, KeyError, TypeError) as e:
        raise EngineError(f"the engine answered with something else than a result: {e}") from None


def _request(item: dict[str, Any]) -> GenerateRequest:
    token_ids, stops = tuple(item["token_ids"]), tuple(item.get("stop_token_ids", ()))
    if not all(type(t) is int for t in (*token_ids, *stops, item["max_tokens"], item.get("top_k", 0))):
        raise TypeError("token_ids, stop_token_ids, max_tokens and top_k are whole numbers")
    return GenerateRequest(
        request_id=str(item["request_id"]),
        token_ids=token_ids,
        max_tokens=item["max_tokens"],
        stop_token_ids=stops,
        temperature=float(item.get("temperature", 1.0)),
        top_p=float(item.get("top_p", 1.0)),
        top_k=item.get("top_k", 0),
    )


def _line(item: dict[str, Any]) -> bytes:
    return json.dumps(item, separators=(",", ":")).encode() + b"\n"
