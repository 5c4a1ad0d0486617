"""Everything a caller can be told went wrong, in OpenAI's envelope.

Each constructor is one situation; its message is one sentence that says what to change. A status that the
official client retries by itself (408, 409, 429, 5xx) is used only where trying again can help.
"""

from __future__ import annotations

from typing import Any

from rollout.trajectories import NAME_CHARACTERS


class ApiError(Exception):
    """Ends a request with `status` and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"'{param}' is not supported: {why}.", param=param, code="unsupported_parameter")


def wrong_name(param: str) -> ApiError:
    message = f"'{param}' names a trajectory: at most {NAME_CHARACTERS} printable characters."
    return invalid(message, param, "invalid_value")


def still_busy(replica: str, requests: int, seconds: float) -> ApiError:
    return ApiError(
        409,
        f"Replica '{replica}' still had {requests} requests in flight after {seconds:.0f} s and stays in "
        f"rotation; try again.",
        param="replica",
        code="replica_busy",
    )


def bad_key() -> ApiError:
    return ApiError(
        401,
        "The API key is missing, unknown or revoked; send 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
    )


def missing_scope(scope: str) -> ApiError:
    return ApiError(
        403, f"This API key lacks the scope '{scope}'; use a key that has it.", code="insufficient_scope"
    )


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, f"No {what} '{name}' in this project.", code="not_found")


def unknown_model(name: str, available: list[str]) -> ApiError:
    return ApiError(
        404,
        f"The model '{name}' does not exist; use one of: {', '.join(available)}.",
        param="model",
        code="model_not_found",
    )


def unknown_tier(name: str) -> ApiError:
    return invalid(
        f"Unknown service_tier '{name}'; use 'default', 'fast', 'flex' or 'auto'.",
        "service_tier",
        "unknown_service_tier",
    )


def context_overflow(limit: int) -> ApiError:
    return invalid(
        f"Prompt and max_completion_tokens together exceed the context of {limit} tokens; "
        "shorten the messages or lower max_completion_tokens.",
        "messages",
        "context_length_exceeded",
    )


def tier_unavailable(tier: str, why: str) -> ApiError:
    return ApiError(
        503,
        f"No replica of tier '{tier}' can serve yet ({why}); try again shortly.",
        code="engine_unavailable",
        retry_after_s=2,
    )


def engine_lost() -> ApiError:
    return ApiError(
        503, "The engine went away while answering; try again.", code="engine_unavailable", retry_after_s=2
    )


def server_failed() -> ApiError:
    return ApiError(500, "The server failed; the log says why.", code="server_error")


def not_recorded() -> ApiError:
    return ApiError(
        500,
        "The answer could not be recorded and was therefore withheld; try again.",
        code="record_not_committed",
    )


def lost_race(message: str) -> ApiError:
    return ApiError(412, message, code="precondition_failed")


def not_verified(policy: str, missing: str) -> ApiError:
    # 409: the official client tries again by itself, and waiting is what helps.
    return ApiError(
        409,
        f"Policy {policy} cannot be served yet: {missing}; try again shortly.",
        code="policy_not_verified",
        retry_after_s=1,
    )


def too_large(limit_mb: int) -> ApiError:
    error = ApiError(413, f"The body has more than {limit_mb} MB; send less.", code="request_too_large")
    error.headers["connection"] = "close"  # the rest is not read
    return error


def cannot_be_stored() -> ApiError:
    return invalid("The store cannot hold a value of this request; the log says which.", code="invalid_value")


def store_unavailable() -> ApiError:
    return ApiError(
        503, "The store does not answer; try again shortly.", code="store_unavailable", retry_after_s=2
    )
