"""Responses from any server that speaks OpenAI's chat protocol (vLLM, SGLang, transformers serve, llama.cpp, …)."""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.respond import Written
from draftsmith.errors import RefusedPromptError, ServerError
from draftsmith.target.asking import FIRST_WAIT_S, TRIES, CannotAsk, NoAnswer, ask, told

# What may pass by itself: busy, restarting, overloaded.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
REFUSING = {400, 413, 422}
# How a whole answer ends, in the words of several servers.
ENDED = {"stop", "tool_calls", "function_call", "eos_token", "stop_sequence", "end_turn"}


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
        # No proxy of the environment's: the key is for this server.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

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
        # A server is not given its own thoughts back; it would drop them, or take them for words.
        given = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
        body: dict[str, Any] = {"model": self._model, "messages": given, **self._settings}
        body |= {"tools": list(tools)} if tools else {}
        body |= {"chat_template_kwargs": dict(options)} if options else {}
        try:
            sent = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RefusedPromptError("not JSON", f"{error}") from error
        if "seed" in body:
            # The same question asked twice is two draws.
            sent = json.dumps({**body, "seed": zlib.crc32(sent)}).encode()
        try:
            answer = await ask(
                self._client,
                f"{self._url}/chat/completions",
                sent,
                passes=PASSING.__contains__,
                first_wait_s=self._first_wait_s,
            )
        except CannotAsk as error:
            raise ServerError(f"server {self._url} cannot be asked ({error}); check --server and --key-file") from None
        except NoAnswer as error:
            raise ServerError(
                f"server {self._url} did not answer {TRIES} times ({error}); see that it runs and try again: what was written is kept"
            ) from None
        if answer.status_code in REFUSING:
            raise RefusedPromptError(f"status {answer.status_code}", told(answer))
        if answer.status_code != 200:
            raise ServerError(f"server {self._url} answers with {told(answer)}; check --server, --model and --key-file")
        return self._read(answer)

    def _read(self, answer: httpx.Response) -> Written:
        try:
            whole = answer.json()
            choice = whole["choices"][0]
            message = choice["message"]
            text, thought = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
            calls = tuple(message.get("tool_calls") or ())
            tokens = int((whole.get("usage") or {}).get("completion_tokens") or 0)
            reason = choice.get("finish_reason")
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(
                f"server {self._url} answers with something else than a chat completion ({type(error).__name__}: {error}): "
                f"{' '.join(answer.text.split())[:200]}; check that --server ends in /v1"
            ) from error
        if reason not in (*ENDED, "length"):
            raise RefusedPromptError(f"ended by '{reason}'")
        if reason == "length" and thought:
            # What stood between thought and text is the server's knowledge; a whole answer the template can put together, this not.
            raise RefusedPromptError("cut off at the limit after thoughts")
        if not (text or thought or calls):
            raise RefusedPromptError("empty answer")
        return Written(text, reason != "length", tokens, thought, calls)
