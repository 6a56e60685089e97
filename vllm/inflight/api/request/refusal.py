"""The reply to a request that is rejected: a typed error, with its status."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from vllm.inflight.errors import InflightError


def refusal(error: InflightError) -> JSONResponse:
    """The reply for an error, as every route of ours gives it."""
    after = error.retry_after_s
    headers = None if after is None else {"Retry-After": str(after)}
    body = {"success": False, "message": error.message, "error": error.to_dict()}
    return JSONResponse(body, error.status, headers)
