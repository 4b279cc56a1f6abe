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
        if not hmac.compare_digest(_token(authorization or "", "bearer"), api_key.encode()):
            raise _refusal("send it as 'Authorization: Bearer KEY'", "Bearer")

    return check


def check_browser(api_key: str | None) -> Check:
    """Likewise, and the key may also be the password, with any user name, of basic authentication."""

    async def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if api_key is None:
            return
        if not hmac.compare_digest(_password(authorization or ""), api_key.encode()):
            raise _refusal(
                "in a browser give any user name, and the key as the password",
                'Basic realm="hisparse", charset="UTF-8"',
            )

    return check


def _token(authorization: str, scheme: str) -> bytes:
    """What comes with a scheme, the bytes as they came; nothing with another one."""
    given, _, rest = authorization.partition(" ")
    return rest.encode("latin-1") if given.lower() == scheme else b""


def _password(authorization: str) -> bytes:
    try:
        decoded = b64decode(_token(authorization, "basic"), validate=True)
    except binascii.Error:
        return b""
    return decoded.partition(b":")[2] or _token(authorization, "bearer")


def _refusal(advice: str, challenge: str) -> ApiError:
    return ApiError(
        f"the API key is missing or wrong: {advice}",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge},
    )
