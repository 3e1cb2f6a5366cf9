"""Keeps as many replicas as there should be: starts, watches, drains and replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

from batchmaker.clock import Clock, RealClock
from batchmaker.fleet.balancer import Balancer, Replica
from batchmaker.fleet.handover import hand_over
from batchmaker.fleet.links import Link
from batchmaker.fleet.scaling import Autoscaler, ScalingRule
from batchmaker.fleet.shared_upstream import SharedUpstream
from batchmaker.fleet.upstream import NoAnswerError, Upstream
from batchmaker.server.config import Config

_LOG = logging.getLogger("batchmaker.fleet")
_LOOK_S: Final = 1.0
"""Seconds between two looks at a replica, and at the fleet."""

_ANSWER_S: Final = 5.0
_DEAD_S: Final = 15.0
"""Seconds without any answer, after which a replica is given up although its process runs."""

_HUNG_S: Final = 30.0
"""Seconds in which a replica says that it is not ready, after which it is replaced."""

_MOST_BACKOFF_S: Final = 30.0


class Running(Protocol):
    """A replica's process. http: host and port. grpc: as in grpc://host:port, None without gRPC."""

    http: tuple[str, int]
    grpc: str | None

    async def ended(self) -> None:
        """Return when the process has ended, for whatever reason."""

    async def stop(self) -> None:
        """End in order: finish what was accepted, within the settings' `drain_seconds`."""

    def kill(self) -> None:
        """End at once."""


class Launcher(Protocol):
    """Starts replicas somewhere."""

    async def launch(self, number: int, config: Config) -> Running:
        """Return a replica that takes requests, with the settings' models. number: its own, never used again.

        Raises what is wrong with the settings; StoppedError if the process ended before that. Cancelled, nothing of it
        is left.
        """


@final
@dataclass(slots=True, eq=False)
class _Member:
    number: int
    generation: int
    task: asyncio.Task[None] | None = None
    replica: Replica | None = None
    running: Running | None = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    look: asyncio.Event = field(default_factory=asyncio.Event)


@final
class Fleet:
    """Replicas behind a balancer. `size` may change at any time, by a rule too; `update` replaces all, one by one.

    key_of: see Link; the fleet's own calls have the key of "". open_channel: makes a replica's gRPC channel.
    """

    def __init__(
        self,
        balancer: Balancer,
        launcher: Launcher,
        config: Config,
        key_of: Callable[[str], str],
        *,
        size: int = 1,
        rule: ScalingRule | None = None,
        open_channel: Callable[[str], Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.balancer = balancer
        self.size = size
        self._launcher = launcher
        self.config = config
        self._key_of = key_of
        self._rule = rule
        self._open_channel = open_channel
        self._clock: Clock = clock or RealClock()
        self._scaler = None if rule is None else Autoscaler(rule, size)
        self._members: dict[int, _Member] = {}
        self._numbers = 0
        self._generation = 0
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._not_before_s = -math.inf
        self._backoff_s = _LOOK_S / 2
        self._error: BaseException | None = None
        self._ending = False

    # --- from outside -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when all replicas take requests. Raises the first error of starting one."""
        self._keeping = asyncio.create_task(self._keep())
        await self.ready()

    async def ready(self) -> None:
        """Return when there are as many replicas as there should be. Raises the first error of starting one."""
        try:
            await self._until(lambda: self._error is not None or self._num_ready() >= self.size)
            if self._error is not None:
                raise self._error
        except BaseException:
            await self.stop()
            raise

    async def update(self, config: Config) -> None:
        """Replace all replicas by those with other settings, one by one: each one serves before an old one leaves.

        Returns when that is done. If replicas with these settings do not start, the old ones stay, and it is tried
        again until the next update.
        """
        self.config = config
        self._generation += 1
        generation = self._generation
        self._not_before_s, self._backoff_s = -math.inf, _LOOK_S / 2
        self._changed.set()

        def done() -> bool:
            mine = [member for member in self._members.values() if member.generation >= generation]
            ready = [m for m in mine if m.replica is not None and m.replica.state == "open"]
            return self._generation != generation or (len(ready) >= self.size and len(mine) == len(self._members))

        await self._until(done)

    def resize(self, size: int) -> None:
        """Have `size` replicas from now on: more are started, those too many are drained."""
        self.size = size
        self._changed.set()

    def running(self, number: int) -> Running | None:
        """Return the process of a replica, None if there is none of that number."""
        member = self._members.get(number)
        return None if member is None else member.running

    def suspect(self, replica: Replica) -> None:
        """A replica did not answer: it gets nothing until it has been looked at, which happens now."""
        self.balancer.suspend(replica)
        member = self._members.get(replica.number)
        if member is not None:
            member.look.set()

    async def stop(self) -> None:
        """End all replicas, and open sequences: in order those that serve, at once those that are starting."""
        self._ending = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for member in self._members.values():
            member.leaving.set()
            if member.replica is None and member.task is not None:
                member.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- keeping ------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Compare what there is with what there should be: at every change, and once a second."""
        next_s = 0.0
        while True:
            self._changed.clear()
            if self._clock.now_s() >= next_s:
                next_s = self._clock.now_s() + (_LOOK_S if self._rule is None else self._rule.every_s)
                self.balancer.forget_idle()
                self._scale()
            self._compare()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, max(next_s - self._clock.now_s(), 0.01))):
                    await self._changed.wait()

    def _scale(self) -> None:
        if self._scaler is None or self._rule is None:
            return
        measured = self.balancer.waiting_s if self._rule.measure == "work" else float(self.balancer.num_sequences)
        wanted = self._scaler.wanted(self._clock.now_s(), measured)
        if wanted != self.size:
            _LOG.info("fleet is resized", extra={"from": self.size, "to": wanted, self._rule.measure: measured})
            self.size = wanted

    def _compare(self) -> None:
        staying = [member for member in self._members.values() if not member.leaving.is_set()]
        new = [member for member in staying if member.generation == self._generation]
        old = [member for member in staying if member.generation != self._generation]
        ready = [member for member in new if member.replica is not None and member.replica.state == "open"]
        if self._clock.now_s() >= self._not_before_s:
            for _ in range(self.size - len(staying)):
                self._start_one()
            if old and len(ready) == len(new) and len(staying) == self.size:
                self._start_one()
        if old and len(ready) + len(old) > self.size:
            self._leave(old[0])
        elif not old and len(new) > self.size:
            self._leave(min(new, key=_to_lose))

    def _start_one(self) -> None:
        member = _Member(self._numbers, self._generation)
        self._members[member.number] = member
        self._numbers += 1
        member.task = asyncio.create_task(self._live(member, self.config))

    def _leave(self, member: _Member) -> None:
        member.leaving.set()
        if member.replica is None and member.task is not None:
            member.task.cancel()
        elif member.replica is not None:
            self.balancer.drain(member.replica)
            _LOG.info("replica is drained", extra={"replica": member.number})

    # --- one replica --------------------------------------------------------------------------------------------------

    async def _live(self, member: _Member, config: Config) -> None:
        """The life of one replica, from its start to the end of its process."""
        try:
            running = member.running = await self._launcher.launch(member.number, config)
        except asyncio.CancelledError:
            self._gone(member)
            raise
        except Exception as error:
            self._failed(member, error)
            return
        self._backoff_s = _LOOK_S / 2
        channel = None
        if running.grpc is not None and self._open_channel is not None:
            channel = self._open_channel(running.grpc)
        shared = SharedUpstream(*running.http, lambda: self._key_of(""))
        link = Link(Upstream(*running.http), shared, self._key_of, channel)
        replica = member.replica = self.balancer.open(member.number, link)
        _LOG.info("replica takes requests", extra={"replica": member.number, "address": running.http})
        self._changed.set()
        ended = asyncio.ensure_future(running.ended())
        watching = asyncio.create_task(self._watch(member, link))
        leaving = asyncio.create_task(self._drained(member, config))
        try:
            await asyncio.wait((ended, watching, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not ended.done() and not watching.done():
                self.balancer.remove(replica)
                await running.stop()
            else:
                why = watching.exception() if watching.done() and not watching.cancelled() else None
                counts = {"replica": member.number, "requests": replica.num_requests}
                _LOG.warning("replica is lost", extra=counts, exc_info=why)
        finally:
            self.balancer.remove(replica)
            link.close()
            running.kill()
            for task in (ended, watching, leaving):
                task.cancel()
            await asyncio.gather(ended, watching, leaving, return_exceptions=True)
            self._gone(member)

    async def _watch(self, member: _Member, link: Link) -> None:
        """Look at a replica once a second, and when it is suspected. Returns when it has to be replaced."""
        replica = member.replica
        assert replica is not None
        answered_s = ready_s = time.monotonic()
        busy: dict[str, float] = {}
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await member.look.wait()
            member.look.clear()
            now_s = time.monotonic()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    ready = (await link.http.call(_asking(b"/v2/health/ready", link.key_of("")))).status == 200
                    self._learn(
                        replica, busy, (await link.http.call(_asking(b"/metrics", link.key_of("")))).body or b""
                    )
            except (NoAnswerError, TimeoutError) as error:
                self.balancer.suspend(replica)
                if time.monotonic() - answered_s > _DEAD_S or isinstance(error.__cause__, ConnectionRefusedError):
                    return
                await asyncio.sleep(_LOOK_S / 10)
                member.look.set()
                continue
            answered_s = time.monotonic()
            if ready:
                ready_s = now_s
                self.balancer.resume(replica)
            else:
                self.balancer.suspend(replica)
                if now_s - ready_s > _HUNG_S:
                    _LOG.error("replica hangs and is replaced", extra={"replica": member.number})
                    return
            self._changed.set()

    def _learn(self, replica: Replica, busy: dict[str, float], metrics: bytes) -> None:
        """Take over how long a replica has computed, from its metrics. busy: seconds by model, at the last look."""
        for line in metrics.splitlines():
            if line.startswith(b"batchmaker_busy_seconds_total{"):
                labels, _, value = line.decode().rpartition(" ")
                model, seconds = labels.partition('model="')[2].partition('"')[0], float(value)
                self.balancer.learn(replica, model, 1e6 * (seconds - busy.get(model, seconds)))
                busy[model] = seconds

    async def _drained(self, member: _Member, config: Config) -> None:
        """Return when a replica that leaves has nothing more to finish, or its time for that is over.

        Its open sequences are handed over to others; those that no other one takes go on here meanwhile, unless the
        whole fleet ends.
        """
        await member.leaving.wait()
        assert member.replica is not None
        self.balancer.drain(member.replica)
        end = time.monotonic() + config.limits.drain_seconds
        if not self._ending:
            try:
                async with asyncio.timeout(config.limits.drain_seconds):
                    await hand_over(self.balancer, member.replica)
            except TimeoutError:
                pass  # they go on here, until they end with it
            except Exception:
                _LOG.exception("sequences were not handed over", extra={"replica": member.number})
        while time.monotonic() < end and not (
            member.replica.idle or (self._ending and not member.replica.num_requests)
        ):
            await asyncio.sleep(0.02)

    def _failed(self, member: _Member, error: Exception) -> None:
        """A replica did not start: say so, and try again later."""
        _LOG.error("replica did not start", extra={"replica": member.number, "error": str(error)})
        self._error = error
        self._not_before_s = self._clock.now_s() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _MOST_BACKOFF_S)
        self._gone(member)

    def _gone(self, member: _Member) -> None:
        self._members.pop(member.number, None)
        self._changed.set()

    def _num_ready(self) -> int:
        return sum(replica.state == "open" for replica in self.balancer.replicas.values())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.02)


def _to_lose(member: _Member) -> tuple[bool, int, int, int]:
    """The order in which replicas leave: those that are starting, with few sequences, with little work; the newest."""
    replica = member.replica
    if replica is None:
        return False, 0, 0, -member.number
    return True, replica.num_sequences, replica.work_us, -member.number


def _asking(target: bytes, key: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nhost: replica\r\nx-api-key: %s\r\n\r\n" % (target, key.encode())
