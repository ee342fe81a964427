"""`draftsmith regenerate`: the target writes the responses that a drafter is then trained on."""

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from draftsmith.build.resume import Say
from draftsmith.data.chat import ChatFormat
from draftsmith.data.files import read_records
from draftsmith.data.responses import ResponseFile
from draftsmith.data.text import Record
from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.converse import Conversation, Message, converse, whole_part
from draftsmith.decode.respond import Written, write_responses
from draftsmith.decode.server import ChatServer
from draftsmith.errors import DataError, DraftsmithError, RefusedPromptError, UsageError
from draftsmith.pipeline.signals import StopRequest, stop_on_signals
from draftsmith.runs.reporter import RunReporter
from draftsmith.target.load import Target

EVERY_S = 10.0
# Conversations under way at once, in batches: enough that those of a batch have prompts of similar length.
BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Writing:
    """How responses are written. options: what the chat template is told; limit: rows read at most."""

    max_new_tokens: int
    sampling: Sampling | None = None
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


class Regenerated(NamedTuple):
    """rows: in the file now; unfinished: of these, cut off at the limit; skipped: rows that nothing could be written for, by reason;
    signal_number: the signal that ended it early, if one did."""

    rows: int
    unfinished: int
    skipped: dict[str, int]
    signal_number: int | None


class _Job:
    """The rows to do, and what becomes of them. Both ways of writing use it."""

    def __init__(self, source: str, file: ResponseFile, writing: Writing, say: Say, reporter: RunReporter) -> None:
        self.file, self.stop, self.skipped = file, StopRequest(), dict[str, int]()
        self._say, self._reporter, self._options = say, reporter, writing.options
        self.records = [
            (number, record)
            for number, record in enumerate(itertools.islice(read_records(source), writing.limit))
            if number not in file.done
        ]
        self.total = len(self.records) + len(file.done)
        self._begin = self._told = time.perf_counter()
        self._rows = self._tokens = 0

    def keep(self, number: int, record: Record, whole: Conversation) -> None:
        """A conversation is written."""
        if not any(message["role"] == "assistant" for message in whole.messages):
            self.skip("no question to answer")
            return
        row: dict[str, Any] = {"messages": whole.messages}
        row |= {"tools": list(record.tools)} if record.tools else {}
        # Training must render what the target was told here.
        told = {**self._options, **record.options}
        row |= {"chat_template_kwargs": told} if told else {}
        row |= {"category": record.category} if record.category is not None else {}
        row |= {"unfinished": True} if whole.unfinished else {}
        self.file.add(number, row)
        self._rows += 1
        self._tokens += whole.tokens
        self._progress()

    def give_up(self, number: int, record: Record, history: Sequence[Message], reason: str, example: str = "") -> None:
        """The last question of a history has no answer: what is whole before it is kept, else the row is skipped."""
        part = whole_part(history)
        if part.messages:
            self.keep(number, record, part)
            return
        if example and reason not in self.skipped:
            self._say(f"responses  {record.name}: {reason}: {example}")
        self.skip(reason)

    def skip(self, reason: str) -> None:
        """Nothing can be written for a row."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self._progress()

    def _progress(self) -> None:
        now, done = time.perf_counter(), self._rows + sum(self.skipped.values())
        if now - self._told < EVERY_S and done < len(self.records):
            return
        self._told = now
        took = max(now - self._begin, 1e-9)
        left = (len(self.records) - done) * took / done
        self._say(
            f"responses  {len(self.file.done)} of {self.total} rows, {self._tokens / took:,.0f} tokens/s, {left:,.0f} s left"
        )
        self._reporter.phase("preparing", step=len(self.file.done), steps=self.total)


Talk = Generator[list[Message], Written, Conversation]


def _send(talk: Talk, written: Written | None) -> list[Message] | Conversation:
    """The next history to answer, or the whole conversation."""
    try:
        return next(talk) if written is None else talk.send(written)
    except StopIteration as ended:
        whole: Conversation = ended.value
        return whole


def regenerate_here(source: str, out: Path, target: Target, writing: Writing, *, batch_size: int, say: Say) -> Regenerated:
    """Let a loaded target write, many conversations in a batch. Raises DraftsmithError."""
    if target.text_config().max_position_embeddings <= writing.max_new_tokens:
        raise UsageError(
            f"--max-new-tokens {writing.max_new_tokens} leaves no room for a prompt: the target has "
            f"{target.text_config().max_position_embeddings} positions; give fewer"
        )
    who = {"target": target.name, "digest": target.digest, "dtype": str(target.embedding.dtype).removeprefix("torch.")}
    with ResponseFile(out, _settings(source, writing, who)) as file:
        job = _Job(source, file, writing, say, RunReporter.from_environment())
        chat = ChatFormat(target.tokenizer, target.end_ids, None, writing.options)
        with stop_on_signals(job.stop):
            rows = iter(job.records)
            while not job.stop and (window := list(itertools.islice(rows, BATCHES_AHEAD * batch_size))):
                _write_window(job, window, chat, target, writing, batch_size)
        return _end(job)


def _write_window(
    job: _Job, window: Sequence[tuple[int, Record]], chat: ChatFormat, target: Target, writing: Writing, batch_size: int
) -> None:
    """Carry some conversations on, turn by turn, until all are whole or a stop is asked for."""
    longest = target.text_config().max_position_embeddings - writing.max_new_tokens
    talks = {number: (record, converse(record.messages or ())) for number, record in window}
    waiting = {number: _send(talk, None) for number, (_, talk) in talks.items()}
    while waiting and not job.stop:
        prompts: dict[int, list[int]] = {}
        for number, state in list(waiting.items()):
            record = talks[number][0]
            if isinstance(state, Conversation):
                job.keep(number, record, state)
                del waiting[number]
                continue
            try:
                prompts[number] = chat.prompt(state, record)
            except (TemplateError, ValueError, TypeError) as error:
                job.give_up(number, record, state, "refused by the chat template", " ".join(str(error).split())[:200])
                del waiting[number]
                continue
            if len(prompts[number]) > longest:
                job.give_up(number, record, state, f"longer than the target's {longest + writing.max_new_tokens} positions")
                del waiting[number], prompts[number]
        numbers = list(prompts)
        sampling = None if writing.sampling is None else _apart(writing.sampling, numbers)
        answers = write_responses(
            target,
            list(prompts.values()),
            max_new_tokens=writing.max_new_tokens,
            batch_size=batch_size,
            sampling=sampling,
            interrupted=lambda: bool(job.stop),
        )
        for place, written in answers:
            number = numbers[place]
            record, talk = talks[number]
            state = _send(talk, written)
            if isinstance(state, Conversation):
                job.keep(number, record, state)
                del waiting[number]
            else:
                waiting[number] = state


def _apart(sampling: Sampling, numbers: Sequence[int]) -> Sampling:
    """A seed of its own for each lot of rows."""
    digest = hashlib.blake2b(f"{sampling.seed}/{numbers[:1]}".encode(), digest_size=4).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))


def regenerate_by_server(
    source: str, out: Path, server: str, model: str, writing: Writing, *, key: str | None, at_once: int, say: Say
) -> Regenerated:
    """Let a server write, `at_once` conversations at a time. Raises DraftsmithError."""
    with ResponseFile(out, _settings(source, writing, {"model": model})) as file:
        job = _Job(source, file, writing, say, RunReporter.from_environment())
        with stop_on_signals(job.stop):
            try:
                asyncio.run(_ask_all(job, server, model, writing, key, at_once))
            except* DraftsmithError as errors:
                # Each of the many that were under way may have failed, and of the same cause.
                raise errors.exceptions[0] from None
        return _end(job)


async def _ask_all(job: _Job, url: str, model: str, writing: Writing, key: str | None, at_once: int) -> None:
    rows: Iterator[tuple[int, Record]] = iter(job.records)
    how = {"max_new_tokens": writing.max_new_tokens, "sampling": writing.sampling, "key": key}
    async with ChatServer(url, model, **how) as server:  # type: ignore[arg-type]

        async def worker() -> None:
            for number, record in rows:
                if job.stop:
                    return
                talk = converse(record.messages or ())
                state = _send(talk, None)
                options = {**writing.options, **record.options}
                try:
                    while not isinstance(state, Conversation):
                        state = _send(talk, await server.ask(state, record.tools, options))
                except RefusedPromptError as error:
                    assert not isinstance(state, Conversation)
                    job.give_up(number, record, state, f"no answer by the server: {error.reason}", str(error))
                    continue
                job.keep(number, record, state)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker()) for _ in range(at_once)]
            loop = asyncio.get_running_loop()

            def cancel() -> None:
                for task in tasks:
                    # From a signal's handler: the loop sleeps until something wakes it.
                    loop.call_soon_threadsafe(task.cancel)

            job.stop.wake = cancel


def _settings(source: str, writing: Writing, who: dict[str, Any]) -> dict[str, Any]:
    """What decides the responses: another source, writer or way of drawing would be another file."""
    path = Path(source)
    if path.is_file():
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    elif path.is_dir():
        listing = sorted(
            (str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*") if p.is_file()
        )
        content = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    else:
        content = source
    sampling = asdict(writing.sampling) if writing.sampling is not None else "greedy"
    told = {"max_new_tokens": writing.max_new_tokens, "sampling": sampling, "chat_template_kwargs": writing.options}
    return {**who, "source_sha256": content, **told}


def _end(job: _Job) -> Regenerated:
    if not job.stop:
        if not job.file.done:
            raise DataError(f"no row could be answered: {job.skipped or 'the source is empty'}; give rows with 'messages'")
        job.file.sort()
    return Regenerated(len(job.file.done), job.file.unfinished, job.skipped, job.stop.signal_number)


def read_key(path: Path | None) -> str | None:
    """A server's key from a file: on the command line or in the environment others could read it. Raises UsageError."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file '{path}' cannot be read: {error}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"--key-file '{path}' does not hold one line of printable characters; put the key alone into it")
    return key
