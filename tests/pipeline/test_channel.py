"""Order, back-pressure and ending of the channel, with timing held by events and never by sleep."""

import random
import threading

import pytest

from draftsmith.pipeline.channel import Channel, ChannelClosed


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def waits_inside(channel: Channel[int], thread: threading.Thread) -> None:
    """Return once `thread` sleeps in the channel's condition."""
    while thread.is_alive() and not channel._change._waiters:  # type: ignore[attr-defined]
        pass


def test_items_put_in_any_order_arrive_in_order() -> None:
    for seed in range(20):
        channel: Channel[int] = Channel(3)
        rng = random.Random(seed)
        shares: list[list[int]] = [[], [], []]
        for number in range(60):
            rng.choice(shares).append(number)
        threads = [in_thread(lambda share=share, channel=channel: [channel.put(n, n) for n in share]) for share in shares]
        assert [channel.get() for _ in range(60)] == list(range(60))
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


def test_a_full_channel_blocks_the_producer_until_the_consumer_moves() -> None:
    channel: Channel[int] = Channel(2)
    channel.put(0, 0)
    channel.put(1, 1)
    passed = threading.Event()

    def produce() -> None:
        channel.put(2, 2)
        passed.set()

    thread = in_thread(produce)
    waits_inside(channel, thread)
    assert not passed.is_set()
    assert channel.get() == 0
    assert passed.wait(5)
    assert channel.put_wait_s > 0
    thread.join(5)


def test_an_empty_channel_blocks_the_consumer_and_counts_the_wait() -> None:
    channel: Channel[int] = Channel(2)
    got: list[int] = []
    thread = in_thread(lambda: got.append(channel.get()))
    waits_inside(channel, thread)
    channel.put(0, 7)
    thread.join(5)
    assert got == [7]
    assert channel.get_wait_s > 0
    assert channel.put_wait_s < channel.get_wait_s


@pytest.mark.parametrize("side", ["put", "get"])
def test_closing_wakes_whoever_waits_with_the_cause(side: str) -> None:
    channel: Channel[int] = Channel(1)
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            channel.put(5, 5) if side == "put" else channel.get()
        except ChannelClosed as error:
            seen.append(error)

    thread = in_thread(wait)
    waits_inside(channel, thread)
    cause = ValueError("the other side broke")
    channel.close(cause)
    thread.join(5)
    assert seen
    assert seen[0].__cause__ is cause


def test_a_clean_close_lets_what_is_inside_be_read() -> None:
    channel: Channel[int] = Channel(2)
    channel.put(0, 1)
    channel.close()
    assert channel.get() == 1
    with pytest.raises(ChannelClosed):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.put(1, 1)


def test_an_error_overtakes_what_is_inside() -> None:
    channel: Channel[int] = Channel(2)
    channel.put(0, 1)
    channel.close(RuntimeError())
    with pytest.raises(ChannelClosed):
        channel.get()
