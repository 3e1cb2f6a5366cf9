"""What is written at once leaves at once, in order, and not too much is kept back."""

from __future__ import annotations

import asyncio

from batchmaker.server.http.joined_writes import JoinedWrites


class Recorder:
    """A transport that notes its calls."""

    def __init__(self):
        self.calls = []
        self.closed = False

    def writelines(self, parts):
        self.calls.append(b"".join(parts))

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return f"extra {name}"


def run(body):
    transport = Recorder()

    async def whole():
        await body(JoinedWrites(transport, asyncio.get_running_loop()))

    asyncio.run(whole())
    return transport


def test_a_head_and_its_body_are_one_write():
    async def body(joined):
        joined.write(b"head ")
        joined.write(b"body")
        await asyncio.sleep(0)
        joined.write(b"next")
        await asyncio.sleep(0)

    assert run(body).calls == [b"head body", b"next"]


def test_a_complete_answer_does_not_wait_for_the_end_of_the_turn():
    async def body(joined):
        joined.write(b"head ")
        joined.write(b"body")
        joined.send_now()
        joined.write(b"next")
        await asyncio.sleep(0)

    assert run(body).calls == [b"head body", b"next"]


def test_closing_writes_what_waits_and_nothing_after():
    async def body(joined):
        joined.write(b"last")
        joined.close()
        joined.write(b"lost")
        await asyncio.sleep(0)

    transport = run(body)
    assert (transport.calls, transport.closed) == ([b"last"], True)


def test_much_is_written_without_waiting():
    async def body(joined):
        for _ in range(5):
            joined.write(bytes(40_000))

    assert [len(call) for call in run(body).calls] == [80_000, 80_000, 40_000]


def test_all_else_is_the_transports_own():
    async def body(joined):
        assert joined.get_extra_info("peername") == "extra peername"
        assert not joined.is_closing()

    run(body)
