"""Models come and go while requests run, and each request is answered by the version that took it."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from served_models import Counter, Sums

import batchmaker as bm
from batchmaker.engine.request import SequenceEnd
from batchmaker.errors import OptionError, SavedModelError
from batchmaker.saved.sources import SavedDirectory, parse_source
from batchmaker.server.access.sender import NOBODY
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.memory import leave_models_alone
from batchmaker.server.service.repository import Entry, Repository
from batchmaker.server.service.service import Service
from insides import model_of
from waiting import until

OPTIONS = EngineOptions(threads=1)


def count_to(n, **parameters) -> InferRequest:
    return InferRequest((Tensor("input_0", "INT64", np.array([n])),), parameters=parameters)


def rows(width) -> InferRequest:
    start = Tensor("start", "FP32", np.zeros(width, np.float32))
    return InferRequest((Tensor("rows", "FP32", np.ones((2, width), np.float32)), start))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`counter`, and version 2 of `sums`; version 10 of it lies beside them, as `wider`."""
    saved = tmp_path_factory.mktemp("saved")
    bm.save(Counter(), saved / "models" / "counter")
    (saved / "models" / "sums").mkdir()
    bm.save(Sums(2), saved / "models" / "sums" / "2")
    bm.save(Sums(3), saved / "wider")
    return saved


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved / "models", tmp_path / "models"))


@pytest.fixture
def add_wider(saved, folder):
    """A function that adds version 10 of `sums`."""
    return lambda: shutil.copytree(saved / "wider", folder / "sums" / "10")


def run(repository, body):
    async def whole():
        await repository.load_all()
        try:
            return await body()
        finally:
            await repository.close(5.0)

    return asyncio.run(whole())


def make(folder, limits=None, **options) -> Repository:
    limits = limits or Limits(drain_seconds=20.0)
    return Repository([Entry(parse_source(str(folder)), OPTIONS)], limits, **options)


def states(lines):
    return [(line.name, line.version, line.state) for line in lines]


def test_the_newest_version_answers_unless_another_is_named(folder, add_wider):
    add_wider()
    repository = make(folder, versions="all")

    async def body():
        assert repository.get("sums").version == "10"
        assert repository.versions("sums") == ("2", "10")
        answer = await repository.get("sums", "2").infer(rows(2))
        assert answer.version == "2"
        assert answer.outputs[0].data.tolist() == [2.0, 2.0]

    run(repository, body)


def test_loading_again_brings_a_new_version_and_drains_the_old_one(folder, add_wider):
    repository = make(folder)

    async def body():
        old = repository.get("counter")
        waiting = asyncio.create_task(old.infer(count_to(300)))
        await asyncio.sleep(0)
        add_wider()
        await repository.load("sums")
        await repository.load("counter")
        assert waiting.done()  # loading ends when what was served before has finished
        assert len((await waiting).outputs[0].data) == 300
        assert repository.get("counter") is not old
        assert states(await repository.index(ready_only=True)) == [("counter", "1", "READY"), ("sums", "10", "READY")]
        assert states(await repository.index())[1] == ("sums", "2", "UNAVAILABLE")

    run(repository, body)


@pytest.mark.slow
def test_unloading_finishes_what_was_accepted_and_takes_nothing_new(folder):
    repository = make(folder)

    async def body():
        served = repository.get("counter")
        waiting = asyncio.create_task(served.infer(count_to(300)))
        await asyncio.sleep(0)
        unloading = asyncio.create_task(repository.unload("counter"))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="there is no model 'counter'"):
            repository.get("counter")
        with pytest.raises(ServiceError) as refused:
            await served.infer(count_to(1))
        assert refused.value.kind is FaultKind.UNAVAILABLE
        await unloading
        assert len((await waiting).outputs[0].data) == 300
        await repository.load("counter")
        assert repository.get("counter").ready

    run(repository, body)


@pytest.mark.slow
def test_what_is_not_finished_in_time_is_given_up_as_unavailable(folder):
    repository = make(folder, Limits(drain_seconds=0.01))

    async def body():
        waiting = asyncio.create_task(repository.get("counter").infer(count_to(90_000)))
        await asyncio.sleep(0)
        await repository.unload("counter")
        with pytest.raises(ServiceError) as given_up:
            await waiting
        assert given_up.value.kind is FaultKind.UNAVAILABLE

    run(repository, body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "why"),
    [
        (lambda repository: repository.unload("counter"), "the model is being unloaded"),
        (lambda repository: repository.load("counter"), "the model was loaded anew"),
        (lambda repository: repository.close(5.0), "the server is being stopped"),
    ],
    ids=["unloaded", "loaded anew", "server stops"],
)
def test_sequences_that_a_stop_ends_are_told_to_be_ended_by_it_and_not_by_their_clients(folder, caplog, stops, why):
    repository = make(folder)

    async def body():
        served = repository.get("counter")
        await served.infer(count_to(1, sequence_id=7, sequence_start=True))
        connected, gone = (served.connect(NOBODY, 0) for _ in range(2))
        served.connected.add(lambda: connected.close(stopped=True))  # as every connection does
        gone.close()
        with caplog.at_level("INFO", "batchmaker.server"):
            await stops(repository)
        ended = served.statistics.sequences_ended
        assert (ended[SequenceEnd.STOPPED], ended[SequenceEnd.GIVEN_UP]) == (2, 1)

    run(repository, body)
    ends = [record.why for record in caplog.records if record.getMessage() == "sequence ended"]
    assert sorted(ends) == sorted([why, why, "it was given up"])


@pytest.mark.parametrize(
    "name", ["../counter", "counter/../counter", "/etc", "", ".", "nobody", "counter\0", "x" * 9999]
)
def test_a_name_that_is_not_listed_is_not_found(folder, name):
    repository = make(folder)

    async def body():
        for call in (repository.load, repository.unload):
            with pytest.raises(ServiceError) as caught:
                await call(name)
            assert caught.value.kind is FaultKind.NOT_FOUND
            assert len(str(caught.value)) < 400

    run(repository, body)


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(folder, add_wider, caplog):
    repository = make(folder)

    async def body():
        add_wider()
        next((folder / "sums" / "10").glob("*.safetensors")).write_bytes(b"broken")
        with pytest.raises(ServiceError, match="cannot be loaded; the server's log says why"):
            await repository.load("sums")
        assert repository.get("sums").version == "2"
        assert ("sums", "10", "UNAVAILABLE") in states(await repository.index())
        assert str(folder) not in str(await repository.index())

    run(repository, body)
    assert "0_add.safetensors" in caplog.records[-1].error


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_model_whose_code_leaves_while_it_is_loaded_cannot_be_loaded(folder, monkeypatch, kind):
    repository = make(folder)

    async def body():
        monkeypatch.setattr(Sums, "restore", leave)
        with pytest.raises(ServiceError, match="cannot be loaded"):
            await repository.load("sums")
        assert repository.get("sums").ready
        return await Service(repository, Limits()).infer("counter", None, count_to(3))

    def leave(model, state):
        raise kind

    assert run(repository, body).model == "counter"


def test_a_model_that_cannot_be_loaded_stops_the_start(folder):
    next((folder / "counter").glob("*.safetensors"), folder / "counter" / "manifest.json").write_bytes(b"broken")
    with pytest.raises(SavedModelError):
        asyncio.run(make(folder).load_all())


def test_two_models_of_one_name_are_refused(folder):
    entry = Entry(SavedDirectory("twin", folder / "counter"), OPTIONS)
    with pytest.raises(OptionError, match="two models are named 'twin'"):
        asyncio.run(Repository([entry, entry], Limits()).load_all())


def test_a_full_model_refuses_with_when_to_try_again(folder):
    repository = make(folder, Limits(max_in_flight=2))

    async def body():
        served = repository.get("counter")
        waiting = [asyncio.create_task(served.infer(count_to(90_000))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="takes no more now") as refused:
            await served.infer(count_to(1))
        assert refused.value.retry_after_s
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await until(lambda: not served.statistics.in_flight)
        assert len((await served.infer(count_to(3))).outputs[0].data) == 3
        assert served.statistics.refused[FaultKind.UNAVAILABLE] == 1

    run(repository, body)


def test_cancelling_and_deadlines_free_their_places(folder):
    repository = make(folder)

    async def body():
        served = repository.get("counter")
        leaving = asyncio.create_task(served.infer(count_to(90_000)))
        late = asyncio.create_task(served.infer(count_to(90_000, deadline_ms=30)))
        await asyncio.sleep(0)
        assert served.statistics.in_flight == 2
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(ServiceError) as caught:
            await late
        assert caught.value.kind is FaultKind.DEADLINE
        await until(lambda: not served.statistics.in_flight)
        assert served.statistics.failed[FaultKind.CANCELLED] == 1
        assert (served.statistics.failed[FaultKind.DEADLINE], served.statistics.missed) == (1, 1)

    run(repository, body)


def test_streams_are_limited_and_give_their_place_back(folder):
    repository = make(folder)

    async def body():
        service = Service(repository, Limits(max_streams=1))
        first = service.stream("counter", None, count_to(50_000))
        assert (await anext(first)).outputs[0].data.tolist() == [1]
        with pytest.raises(ServiceError, match="1 streams are open"):
            await anext(service.stream("counter", None, count_to(1)))
        await first.aclose()
        parts = [part.outputs[0].data.tolist() async for part in service.stream("counter", None, count_to(2))]
        assert parts == [[1], [2]]
        assert service.num_streams == 0

    run(repository, body)


def test_a_draining_service_takes_nothing_new(folder):
    repository = make(folder)

    async def body():
        service = Service(repository, Limits())
        assert service.ready
        service.drain()
        assert not service.ready
        with pytest.raises(ServiceError, match="shutting down"):
            await service.infer("counter", None, count_to(1))

    run(repository, body)


@pytest.mark.slow
def test_two_models_of_one_name_that_come_later_are_refused_alone(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    bm.save(Sums(), other / "more")
    sources = [Entry(parse_source(str(path)), OPTIONS) for path in (folder, other)]
    repository = Repository(sources, Limits(drain_seconds=20.0))

    async def body():
        bm.save(Counter(), other / "counter")
        with pytest.raises(ServiceError, match="two models are named 'counter'") as refused:
            await repository.load("counter")
        assert refused.value.kind is FaultKind.INVALID
        await repository.load("more")
        assert repository.get("counter").ready, "what was served goes on"
        lines = {line.name: line.state for line in await repository.index()}
        assert lines == {"counter": "READY", "more": "READY", "sums": "READY"}

    run(repository, body)


@pytest.mark.slow
def test_reloading_loads_what_is_new_or_has_changed_and_unloads_what_is_gone(folder, tmp_path_factory):
    repository = make(folder)
    entries = [Entry(parse_source(str(folder)), OPTIONS)]

    async def body():
        counter, sums = repository.get("counter"), repository.get("sums")
        await repository.reload(entries, "latest")
        assert repository.get("counter") is counter
        bm.save(Counter(), folder / "second")
        shutil.rmtree(folder / "counter")
        shutil.rmtree(folder / "sums" / "2")
        bm.save(Sums(3), folder / "sums" / "2")
        await repository.reload(entries, "latest")
        assert repository.get("second").ready
        assert repository.get("sums") is not sums
        assert (await repository.get("sums").infer(rows(3))).outputs[0].data.tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(ServiceError):
            repository.get("counter")

    run(repository, body)


def test_reloading_leaves_what_cannot_be_loaded_anew_as_it_was(folder, caplog):
    repository = make(folder)

    async def body():
        sums = repository.get("sums")
        (folder / "sums" / "10").mkdir()
        (folder / "sums" / "10" / "manifest.json").write_text("{")
        bm.save(Counter(), folder / "second")
        await repository.reload([Entry(parse_source(str(folder)), OPTIONS)], "latest")
        assert repository.get("sums") is sums
        assert repository.get("second").ready
        assert "model cannot be loaded" in caplog.text

    run(repository, body)


def test_without_a_model_the_repository_is_not_ready(folder):
    repository = make(folder)

    async def body():
        assert repository.ready
        for name in ("counter", "sums"):
            await repository.unload(name)
        assert not repository.ready

    run(repository, body)


@pytest.fixture
def no_collector():
    """What is freed in the test is not freed by chance."""
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_a_replaced_or_unloaded_model_held_is_freed_when_it_has_ended(folder, frozen):
    repository = make(folder)

    async def body():
        if frozen:
            leave_models_alone()  # as a server does when it has started
        kept = []
        for step in (repository.load, repository.load, repository.unload):
            served = repository.get("sums")
            assert (await served.infer(rows(2))).outputs
            kept += [weakref.ref(served), weakref.ref(served.port), weakref.ref(model_of(served.port))]
            del served
            await step("sums")
            assert [one() for one in kept] == [None] * len(kept)
        assert (await repository.get("counter").infer(count_to(2))).outputs

    run(repository, body)


def test_a_source_that_is_gone_leaves_all_others_as_they_are(folder, tmp_path_factory, caplog):
    file = tmp_path_factory.mktemp("file") / "counted.py"
    file.write_text("from served_models import Counter as build\n")
    other = tmp_path_factory.mktemp("other") / "models"
    bm.save(Counter(), other / "elsewhere")
    entries = [Entry(parse_source(str(source)), OPTIONS) for source in (file, other, folder)]
    repository = Repository(entries, Limits(drain_seconds=20.0))

    async def body():
        file.unlink()
        shutil.rmtree(other)
        served = {"counted": "READY", "counter": "READY", "elsewhere": "READY", "sums": "READY"}
        assert {line.name: line.state for line in await repository.index()} == served
        await repository.load("counter")
        for name in ("counted", "elsewhere"):
            with pytest.raises(ServiceError) as caught:
                await repository.load(name)
            assert caught.value.kind is FaultKind.NOT_FOUND
            assert (await repository.get(name).infer(count_to(2))).outputs, "it serves on"
        assert not await repository.reload(entries, "latest")
        assert {model.name for model in repository.models()} == set(served)
        assert any("counted.py" in getattr(record, "error", "") for record in caplog.records)

    run(repository, body)


def test_a_source_that_is_gone_stops_the_start(folder):
    repository = make(folder)
    shutil.rmtree(folder)
    with pytest.raises(OptionError, match="models cannot be read"):
        asyncio.run(repository.load_all())
