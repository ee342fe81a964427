"""Responses from any server that speaks OpenAI's chat protocol (vLLM, SGLang, transformers serve, llama.cpp, …)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.respond import Written
from draftsmith.errors import RefusedPromptError, ServerError

TRIES = 6
FIRST_WAIT_S = 1.0
# What may pass by itself: busy, restarting, overloaded.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
REFUSING = {400, 413, 422}


class ChatServer:
    """One model on one server. Use it as an async context; `ask` may run many times at once.

    url: up to and including /v1; key: sent as a bearer token, never shown.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        key: str | None = None,
        timeout_s: float = 600.0,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._url, self._model, self._first_wait_s = url.rstrip("/"), model, first_wait_s
        self._settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": 0.0}
        if sampling is not None:
            self._settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
            # Not of the protocol, though most servers know it.
            self._settings |= {"top_k": sampling.top_k} if sampling.top_k else {}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> "ChatServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Written:
        """The model's next turn. Raises RefusedPromptError where the server says that this prompt cannot be answered, and ServerError
        where it cannot be asked at all, after having tried for a while."""
        body: dict[str, Any] = {"model": self._model, "messages": list(messages), **self._settings}
        body |= {"tools": list(tools)} if tools else {}
        body |= {"chat_template_kwargs": dict(options)} if options else {}
        trouble = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._first_wait_s * 2 ** (attempt - 1))
            try:
                answer = await self._client.post(f"{self._url}/chat/completions", json=body)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            told = f"status {answer.status_code}: {' '.join(answer.text.split())[:300]}"
            if answer.status_code in REFUSING:
                raise RefusedPromptError(told)
            if answer.status_code in PASSING:
                trouble = told
                continue
            if answer.status_code != 200:
                raise ServerError(f"server {self._url} answers with {told}; check --server, --model and --key-file")
            return self._read(answer)
        raise ServerError(
            f"server {self._url} did not answer {TRIES} times ({trouble}); see that it runs and try again: what was written is kept"
        )

    def _read(self, answer: httpx.Response) -> Written:
        try:
            whole = answer.json()
            choice = whole["choices"][0]
            message = choice["message"]
            text, thought = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
            tokens = int((whole.get("usage") or {}).get("completion_tokens") or 0)
            finished = choice.get("finish_reason") != "length"
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(
                f"server {self._url} answers with something else than a chat completion ({type(error).__name__}: {error}): "
                f"{' '.join(answer.text.split())[:200]}; check that --server ends in /v1"
            ) from error
        # The server took the thoughts apart; together they are what the target wrote.
        return Written(f"<think>\n{thought.strip()}\n</think>\n\n{text}" if thought else text, finished, tokens)
