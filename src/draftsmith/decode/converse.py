"""A conversation of which the target writes every answer: the user's turns are given, each answer becomes part of the history."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.decode.respond import Written

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Its messages, and whether the last answer was cut off at the writer's limit; tokens: written in all."""

    messages: list[Message]
    unfinished: bool
    tokens: int


def whole_part(history: Sequence[Message]) -> Conversation:
    """What is whole of a conversation whose last question cannot be answered; its tokens are not counted."""
    ends = [place for place, message in enumerate(history, start=1) if message["role"] == "assistant"]
    return Conversation(list(history[: max(ends, default=0)]), False, 0)


def converse(given: Sequence[Message]) -> Generator[list[Message], Written, Conversation]:
    """Yields the history before each answer and is sent what the target wrote; returns the whole.

    Where the original has an answer, or ends with a question, the target answers. It ends early where an answer was cut off, and
    before the result of a tool, which belongs to a call that the target did not make.
    """
    messages: list[Message] = []
    tokens = 0
    for message in [*given, {"role": "assistant"}] if given and given[-1]["role"] == "user" else given:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            messages.append(message)
            continue
        if not messages or messages[-1]["role"] != "user":
            # An opening or doubled answer replies to nobody.
            break
        written = yield list(messages)
        tokens += written.tokens
        answer: Message = {"role": "assistant", "content": written.text}
        answer |= {"reasoning_content": written.thought} if written.thought else {}
        answer |= {"tool_calls": list(written.calls)} if written.calls else {}
        messages.append(answer)
        if not written.finished or written.calls:
            return Conversation(messages, not written.finished, tokens)
    return Conversation(messages, False, tokens)
