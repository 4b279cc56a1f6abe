"""The API key: how programs send it, and how a browser does.

Programs send it as a bearer token, which is all that /v1 takes. A browser cannot be told to, so pages for people take
it as HTTP's basic authentication as well: the browser itself asks for it and keeps it, no script ever sees it, and
it stands in no address. Pages only show; what a browser sends along unasked can start nothing.
"""

import binascii
import hmac
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header

from hisparse.server.errors import ApiError

Check = Callable[..., Awaitable[None]]


def check_program(api_key: str | None) -> Check:
    """A dependency that raises `ApiError` (401) unless the key comes as a bearer token. None: there is no key."""

    async def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if api_key is None:
            return
        given = (authorization or "").removeprefix("Bearer ").encode("latin-1")  # the bytes as they came
        if not hmac.compare_digest(given, api_key.encode()):
            raise _refusal("send it as 'Authorization: Bearer KEY'", "Bearer")

    return check


def check_browser(api_key: str | None) -> Check:
    """Likewise, and the key may also be the password, with any user name, of basic authentication."""

    async def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if api_key is None:
            return
        if not hmac.compare_digest(_given(authorization or ""), api_key.encode()):
            raise _refusal(
                "in a browser give any user name, and the key as the password",
                'Basic realm="hisparse", charset="UTF-8"',
            )

    return check


def _given(authorization: str) -> bytes:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() != "basic":
        return rest.encode("latin-1")
    try:
        return b64decode(rest, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _refusal(advice: str, challenge: str) -> ApiError:
    return ApiError(
        f"the API key is missing or wrong: {advice}",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge},
    )
