"""Rows of training text as people own them: `messages` (role/content), ShareGPT `conversations` (from/value), or plain `text`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.errors import DataError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# What chat templates read of a message; the rest of a row (ids, sources, scores) is not theirs.
MESSAGE_KEYS = ("role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id", "name")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Record:
    """One row: either a chat (`messages`) or plain `text`; `name` is `file:line`.

    tools: what the model may call, as the template shows it; options: arguments of the row's own for its chat template, such as
    `enable_thinking`; category: what kind of prompt it is, for figures by kind; unfinished: its last turn was cut off where the
    writer's limit was, so that the end of the turn is nobody's word.
    """

    name: str
    messages: tuple[Message, ...] | None
    text: str | None
    tools: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    category: str | None = None
    unfinished: bool = False


def _content(content: object, name: str, place: str) -> object:
    """Text as it is; a list of text parts joined. Raises DataError for other kinds of part."""
    if not isinstance(content, list):
        return content
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        raise DataError(f"{name}: {place} has parts of type {', '.join(sorted(kinds - {'text'}))}; only text can be drafted")
    return "".join(str(part.get("text", "")) for part in content)


def _calls(calls: object, name: str, place: str) -> list[Any]:
    """Tool calls with their arguments as an object, as templates expect, whether the row has them so or as JSON text."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{name}: {place}.tool_calls is {type(calls).__name__}, expected a list")
    done = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise DataError(f"{name}: {place}.tool_calls holds {type(call).__name__}, expected objects")
        kept = dict(call)
        inner = dict(kept["function"]) if isinstance(kept.get("function"), Mapping) else kept
        if isinstance(inner.get("arguments"), str):
            try:
                inner["arguments"] = json.loads(inner["arguments"])
            except json.JSONDecodeError:
                raise DataError(
                    f"{name}: {place} calls a tool with arguments that are not JSON: {inner['arguments'][:60]!r}"
                ) from None
        done.append({**kept, "function": inner} if inner is not kept else kept)
    return done


def _message(row: object, name: str, number: int) -> Message:
    place = f"message {number}"
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: {place} is {type(row).__name__}, expected an object with 'role' and 'content'")
    if row.get("role") not in ROLES:
        raise DataError(f"{name}: {place} has role {row.get('role')!r}; expected one of {', '.join(ROLES)}")
    # Columns of tables hold None where a message has no such key.
    kept = {key: row[key] for key in MESSAGE_KEYS if row.get(key) is not None}
    kept["content"] = _content(kept.get("content"), name, place)
    if kept.get("tool_calls"):
        kept["tool_calls"] = _calls(kept["tool_calls"], name, place)
        kept["content"] = kept["content"] or ""
    if not isinstance(kept["content"], str):
        raise DataError(f"{name}: {place} has content of type {type(kept['content']).__name__}, expected text")
    return kept


def _turn(row: object, name: str, number: int) -> Message:
    place = f"turn {number}"
    if not isinstance(row, Mapping) or not isinstance(row.get("value"), str):
        raise DataError(f"{name}: {place} is not an object with 'from' and a text 'value'")
    role = SHAREGPT_ROLES.get(str(row.get("from")))
    if role is None:
        raise DataError(f"{name}: {place} is from {row.get('from')!r}; expected one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": role, "content": row["value"]}


def _tools(row: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise DataError(f"{name}: 'tools' is text that is not JSON: {tools[:60]!r}") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(f"{name}: 'tools' is {type(tools).__name__}, expected a list")
    return tuple(tools)


def parse_record(row: object, name: str) -> Record:
    """A row in any of the three layouts. Raises DataError that names row, place and fault."""
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: expected an object with 'messages', 'conversations' or 'text', found {type(row).__name__}")
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise DataError(f"{name}: 'chat_template_kwargs' is {type(options).__name__}, expected an object")
    category = str(row["category"]) if row.get("category") is not None else None
    for key, read in (("messages", _message), ("conversations", _turn)):
        if row.get(key) is None:
            continue
        turns = row[key]
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise DataError(f"{name}: '{key}' is {type(turns).__name__}, expected a list")
        messages = tuple(read(turn, name, number) for number, turn in enumerate(turns, start=1))
        told = {k: v for k, v in options.items() if v is not None}
        return Record(name, messages, None, _tools(row, name), told, category, row.get("unfinished") is True)
    if isinstance(row.get("text"), str):
        return Record(name, None, row["text"], category=category)
    raise DataError(
        f"{name}: row has keys {sorted(map(str, row))}; expected 'messages' (list), 'conversations' (list) or 'text' (string)"
    )
