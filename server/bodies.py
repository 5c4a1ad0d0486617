"""JSON bodies, checked before any field is looked at: what no engine and no store can hold is a 400.

Numbers are finite and integers have 64 bits, since that is what the engine's JSON has; strings have no NUL,
since PostgreSQL's have none (a lone surrogate is no JSON to begin with). Messages may have one: a model can
say it, records keep messages as bytes, and the next turn has to send them back.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from server import errors

B = TypeVar("B", bound=BaseModel)
FREE_TEXT = "messages"
INTEGERS = range(-(2**63), 2**63)
SHOWN = 200
"""Characters of a field's name in an error."""


def parse(model: type[B], body: bytes) -> B:
    """`body` as `model`; raises a 400 that names the first field that is wrong."""
    try:
        _check(from_json(body or b"{}"), ())
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise _explained(error) from None
    except ValueError as error:
        raise errors.invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _check(value: Any, where: tuple[str | int, ...]) -> None:
    match value:
        case dict():
            for key, inner in value.items():
                _check_text(key, where)
                _check(inner, (*where, key))
        case list():
            for i, inner in enumerate(value):
                _check(inner, (*where, i))
        case str():
            _check_text(value, where)
        case float() if not math.isfinite(value):
            raise _refused(where, "must be a finite number")
        case int() if value not in INTEGERS:
            raise _refused(where, "must be an integer of 64 bits")


def _check_text(text: str, where: tuple[str | int, ...]) -> None:
    if "\0" in text and where[:1] != (FREE_TEXT,):
        raise _refused(where, "must not contain the character NUL")


def _refused(where: tuple[str | int, ...], why: str) -> errors.ApiError:
    param = ".".join(map(str, where))[:SHOWN]
    return errors.invalid(f"'{param or 'body'}' {why}.", param or None, "invalid_value")


def _explained(error: ValidationError) -> errors.ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])[:SHOWN] or None
    if first["type"] == "extra_forbidden":
        return errors.invalid(f"Unknown field '{param}'; remove it.", param, "unknown_parameter")
    if first["type"] == "missing":
        return errors.invalid(f"The field '{param}' is required.", param, "missing_required_parameter")
    return errors.invalid(f"'{param or 'body'}' is wrong: {first['msg']}.", param, "invalid_value")
