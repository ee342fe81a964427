"""One question to a server over HTTP, asked again while what stands in the way may pass."""

import asyncio
from collections.abc import Callable

import httpx

TRIES = 6
FIRST_WAIT_S = 1.0


class NoAnswer(Exception):
    """None came, though it was asked for often enough; the message is the last trouble."""


class CannotAsk(NoAnswer):
    """The question cannot even be sent; the message names the kind of trouble alone, since its words may hold a key."""


def told(answer: httpx.Response) -> str:
    """Status and words of an answer, in a line."""
    return f"status {answer.status_code}: {' '.join(answer.text.split())[:300]}"


async def ask(
    client: httpx.AsyncClient, url: str, body: bytes, *, passes: Callable[[int], bool], first_wait_s: float
) -> httpx.Response:
    """Post JSON and give back the first answer whose status does not pass by itself; waits longer each time. Raises NoAnswer."""
    trouble = ""
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(first_wait_s * 2 ** (attempt - 1))
        try:
            answer = await client.post(url, content=body, headers={"Content-Type": "application/json"})
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise CannotAsk(type(error).__name__) from None
        except httpx.TransportError as error:
            trouble = f"{type(error).__name__}: {error}"
            continue
        if not passes(answer.status_code):
            return answer
        trouble = told(answer)
    raise NoAnswer(trouble)
