"""Ways to hand requests to an engine and to get answers back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_models import (
    HIDDEN,
    Counter,
    Decode,
    Encode,
    Endless,
    Gate,
    LoopTranslator,
    Sums,
    Translator,
    assert_balanced,
    translate,
)

import batchmaker as bm
from batchmaker.engine import StepSeen
from batchmaker.errors import (
    DeadlineError,
    InvalidRequestError,
    ModelError,
    NodeLimitError,
    OptionError,
)
from batchmaker.executor.null import NullExecutor
from batchmaker.policies import CellularPolicy
from covering import covering
from insides import scheduler
from waiting import until, wait_until

SOURCES = [[5, 7, 9], [3], [11, 4, 4, 8, 20, 6], [29, 3], [7] * 9]


@pytest.fixture(scope="module")
def modules() -> tuple[Encode, Decode]:
    torch.manual_seed(3)
    return Encode(), Decode()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[bm.Engine]:
    """An engine for the running sums, whose state is checked at the end."""
    with bm.Engine(Sums(), threads=1, **getattr(request, "param", {})) as engine:
        yield engine
    assert_balanced(engine)


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "workers"), covering([Translator, LoopTranslator], [1, 2]))
def test_every_way_of_asking_gives_the_same_answer(model: Any, workers: int, modules: Any) -> None:
    wanted = [translate(*modules, source) for source in SOURCES]

    async def ask(engine: bm.Engine) -> tuple[list[Any], list[Any]]:
        submitted = await asyncio.gather(*map(engine.submit, SOURCES))
        streamed = [[word async for word in engine.submit(source, stream=True)] for source in SOURCES]
        return submitted, streamed

    with bm.Engine(model(*modules), workers=workers, threads=1) as engine:
        mapped = engine.map(SOURCES)
        futures = [engine.submit(source) for source in SOURCES]
        streamed = [list(engine.submit(source, stream=True)) for source in SOURCES]
        submitted, streamed_async = asyncio.run(ask(engine))
        answers = [mapped, [f.result() for f in futures], streamed, submitted, streamed_async]
    assert [[list(map(int, words)) for words in answer] for answer in answers] == [wanted] * 5
    assert_balanced(engine)


def test_map_answers_in_order_whatever_the_lengths(engine: bm.Engine) -> None:
    requests = [list(range(1 + (37 * i) % 50)) for i in range(120)]
    answers = engine.map(requests, progress=False, max_in_flight=7)
    assert [float(a) for a in answers] == [float(sum(r)) for r in requests]


def test_map_of_nothing_is_nothing(engine: bm.Engine) -> None:
    assert engine.map([], progress=False) == []
    assert engine.map(iter([[1.0]])) == [torch.tensor([1.0])]


def test_map_raises_the_first_error_once_everything_is_settled(engine: bm.Engine) -> None:
    with pytest.raises(InvalidRequestError, match="unfold raised TypeError"):
        engine.map([[1.0], [object()], [2.0]], progress=False)
    assert engine.num_in_flight == 0


def test_a_short_request_overtakes_a_long_one() -> None:
    """The point of cellular batching: nobody waits for the longest of a batch."""
    order: list[str] = []
    with bm.Engine(Counter(), threads=1) as engine:
        long = engine.submit(400)
        long.add_done_callback(lambda _: order.append("long"))
        short = engine.submit(2)
        short.add_done_callback(lambda _: order.append("short"))
        assert short.result() == [1, 2]
        assert len(long.result()) == 400
    assert order == ["short", "long"]


def test_a_request_that_comes_later_joins_the_batch_of_one_that_runs() -> None:
    seen: list[StepSeen] = []
    with bm.Engine(Counter(), threads=1, run_ahead=0) as engine:  # with one ahead, the two take turns
        engine.observe(seen.append)
        stream = iter(engine.submit(500, stream=True))
        next(stream)
        assert engine.submit(3).result() == [1, 2, 3]
        assert len(list(stream)) == 499
    assert any(len(set(step.requests)) == 2 for step in seen)


def test_a_stream_gives_each_value_before_the_next_is_computed() -> None:
    with bm.Engine(Endless(), threads=1) as engine:
        stream = iter(engine.submit(0, stream=True))
        assert [next(stream) for _ in range(5)] == [1, 2, 3, 4, 5]
        stream.close()
        wait_until(lambda: engine.num_in_flight == 0)
    assert_balanced(engine)


def test_a_stream_of_an_unfold_function_that_returns_is_its_result_alone(engine: bm.Engine) -> None:
    assert list(engine.submit([1, 2, 3], stream=True)) == [torch.tensor([6.0])]


def test_a_stream_of_a_returned_sequence_gives_its_elements_in_order() -> None:
    class Steps(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            return self.add.run([[float(x)] for x in xs], ([0.0],)).steps[::-1]

    with bm.Engine(Steps(), threads=1) as engine:
        assert [float(value) for value in engine.submit([1, 2, 3, 4], stream=True)] == [10.0, 6.0, 3.0, 1.0]
        assert engine.map([[1, 2]])[0].tolist() == [[3.0], [1.0]]


def test_a_stream_raises_what_the_request_raises() -> None:
    with bm.Engine(Endless(), threads=1, max_nodes=4) as engine:
        stream = iter(engine.submit(0, stream=True))
        assert [next(stream) for _ in range(3)] == [1, 2, 3]  # the next node is refused before the fourth is handed out
        with pytest.raises(NodeLimitError, match="more than 4 nodes"):
            list(stream)
    assert_balanced(engine)


def test_requests_may_be_keywords_arrays_or_tensors(engine: bm.Engine) -> None:
    import numpy as np

    requests = [{"xs": [1, 2], "form": "nodes"}, {"xs": [1, 2]}, np.array([1, 2]), torch.tensor([1, 2]), (1, 2)]
    assert [float(a) for a in engine.map(requests)] == [3.0] * 5


def test_results_keep_the_structure_that_the_unfold_function_returned() -> None:
    class Structured(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            total = self.add.run([[float(x)] for x in xs], ([0.0],))
            return {"total": total, "more": [total.steps, ("text", 7, None)], "nothing": []}

    with bm.Engine(Structured(), threads=1) as engine:
        answer = engine.map([[1, 2]])[0]
    assert answer["total"].tolist() == [3.0]
    assert answer["more"][0].tolist() == [[1.0], [3.0]]
    assert answer["more"][1] == ("text", 7, None)
    assert answer["nothing"] == []


def test_a_named_tuple_comes_back_as_one() -> None:
    from typing import NamedTuple

    class Answer(NamedTuple):
        total: Any
        note: str

    class Named(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            return Answer(self.add.run([[float(x)] for x in xs], ([0.0],)), "ok")

    with bm.Engine(Named(), threads=1) as engine:
        answer = engine.submit([1, 2]).result()
    assert isinstance(answer, Answer)
    assert (answer.total.tolist(), answer.note) == ([3.0], "ok")


def test_a_request_without_any_cell_is_answered() -> None:
    class Nothing(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            return "nothing to do"

    with bm.Engine(Nothing(), threads=1) as engine:
        assert engine.submit([1]).result(60) == "nothing to do"
        assert list(engine.submit([1], stream=True)) == ["nothing to do"]
    assert_balanced(engine)


def test_many_threads_may_submit_at_once(engine: bm.Engine) -> None:
    answers: dict[int, list[float]] = {}

    def work(number: int) -> None:
        futures = [engine.submit([number, i]) for i in range(40)]
        answers[number] = [float(future.result()) for future in futures]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [float(number + i) for i in range(40)] for number in range(8)}


def test_two_engines_serve_one_model_at_once(modules: Any) -> None:
    model = Translator(*modules)
    with bm.Engine(model, threads=1) as one, bm.Engine(model, threads=1) as other:
        for e in (one, other):  # one after the other: a module must not be traced while another engine computes it
            e.map([SOURCES[0]])
        futures = [(e.submit(s), s) for s in SOURCES * 3 for e in (one, other)]
        assert all(f.result() == translate(*modules, s) for f, s in futures)
    assert_balanced(one)
    assert_balanced(other)


def test_several_event_loops_share_an_engine(engine: bm.Engine) -> None:
    answers: list[float] = []

    def loop() -> None:
        async def ask() -> None:
            answers.extend([float(x) for x in await asyncio.gather(*(engine.submit([i]) for i in range(20)))])

        asyncio.run(ask())

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted([float(i) for i in range(20)] * 3)


# --- giving up -----------------------------------------------------------------------------------------------------


def test_cancelling_the_awaiting_task_frees_the_request_and_the_others_go_on() -> None:
    async def main() -> None:
        async with bm.Engine(Endless(), threads=1) as engine:
            tasks = [asyncio.ensure_future(engine.submit(0)) for _ in range(3)]
            stream = engine.submit(0, stream=True).__aiter__()
            await anext(stream)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True)
            )
            while engine.num_in_flight > 1:
                await anext(stream)
            while scheduler(engine).num_requests > 1:  # a worker may still compute for those that ended
                await anext(stream)
            value = await anext(stream)
            assert await anext(stream) == value + 1
            await stream.aclose()
            await until(lambda: not engine.num_in_flight)
        assert_balanced(engine)

    asyncio.run(main())


def test_leaving_an_async_stream_early_cancels_its_request() -> None:
    async def main() -> None:
        async with bm.Engine(Endless(), threads=1) as engine:
            got = []
            stream = engine.submit(0, stream=True).__aiter__()
            async for value in stream:
                got.append(value)
                if len(got) == 3:
                    break
            await stream.aclose()
            assert got == [1, 2, 3]
            await until(lambda: not engine.num_in_flight)
        assert_balanced(engine)

    asyncio.run(main())


def test_a_request_cancelled_while_its_batch_runs_leaves_its_neighbours_alone() -> None:
    gate = Gate()
    model = Sums(gate)
    gate.opened.set()
    with bm.Engine(model, threads=1) as engine:
        engine.submit([-1]).result()
        gate.opened.clear()
        gate.entered.clear()

        async def main() -> float:
            doomed = asyncio.ensure_future(engine.submit([1, 2, 3]))
            kept = asyncio.ensure_future(engine.submit([4, 5, 6]))
            await asyncio.to_thread(gate.entered.wait, 60)
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            gate.opened.set()
            return float(await kept)

        assert asyncio.run(main()) == 15.0
    assert_balanced(engine)


def test_a_deadline_gives_up_a_request_that_runs_and_one_that_waits() -> None:
    with bm.Engine(Endless(), threads=1) as engine:
        late = [engine.submit(0, deadline_ms=50) for _ in range(3)]
        gone = engine.submit(0, deadline_ms=-1000)
        for future in [*late, gone]:
            with pytest.raises(DeadlineError, match="deadline"):
                future.result(60)
        with pytest.raises(DeadlineError):
            list(engine.submit(0, deadline_ms=20, stream=True))
    assert_balanced(engine)


def test_a_deadline_passes_while_the_engine_waits_for_a_long_step() -> None:
    gate = Gate()
    gate.opened.set()
    with bm.Engine(Sums(gate), workers=2, threads=1) as engine:
        engine.submit([-1]).result()
        gate.opened.clear()
        future = engine.submit([1], deadline_ms=30)
        with pytest.raises(DeadlineError):
            future.result(60)
        gate.opened.set()
    assert_balanced(engine)


def test_a_generous_deadline_changes_nothing(engine: bm.Engine) -> None:
    assert float(engine.submit([1, 2], deadline_ms=60_000).result()) == 3.0


# --- what can be seen and chosen -------------------------------------------------------------------------------------


def test_the_observer_sees_every_step_once() -> None:
    seen: list[StepSeen] = []
    with bm.Engine(Sums(batch_sizes=[4, 8]), threads=1) as engine:
        engine.observe(seen.append)
        engine.map([[1, 2, 3]] * 5)
    assert sum(len(step.requests) for step in seen) == 15 == engine.stats.cells
    assert len(seen) == engine.stats.steps
    assert {step.padded for step in seen} <= {4, 8}
    assert all(step.padded >= len(step.requests) for step in seen)
    assert all(step.cell == "add" and step.worker == 0 and step.end_s >= step.begin_s for step in seen)
    assert sum(step.padded for step in seen) == engine.stats.padded_cells


def test_tickets_tell_how_long_a_request_waited_and_took() -> None:
    tickets: list[Any] = []
    engine = bm.Engine(Counter(), threads=1)
    engine.on_settled = lambda ticket, error: tickets.append((ticket, error))
    with engine:
        engine.submit(5).result()
    ((ticket, error),) = tickets
    assert error is None
    assert ticket.num_cells == 5
    assert 0 <= ticket.queue_s <= ticket.latency_s


def test_a_null_executor_answers_every_request_with_zeros() -> None:
    executor = NullExecutor(2, record=True)
    with bm.Engine(LoopTranslator(Encode(), Decode()), executor=executor) as engine:
        answers = engine.map([[3, 4], [5]])
    assert [answer.tolist() for answer in answers] == [[0] * 7, [0] * 5]
    assert {task.worker for task in executor.submitted} <= {0, 1}
    assert_balanced(engine)


class Padded(Sums):
    def batched(self, requests: Any) -> list[Any]:
        return [torch.tensor([float(sum(request))]) for request in requests]


@pytest.mark.parametrize("policy", ["cellular", "padded", "serial", CellularPolicy()])
def test_policies_give_the_same_answers(policy: Any) -> None:
    with bm.Engine(Padded(), policy, threads=1, workers=2) as engine:
        assert [float(x) for x in engine.map([[1] * n for n in range(1, 20)])] == [float(n) for n in range(1, 20)]
    assert engine.num_in_flight == 0


def test_one_bad_request_in_a_padded_batch_fails_alone() -> None:
    class Short(Padded):
        def batched(self, requests: Any) -> list[Any]:
            return super().batched(requests)[: 1 if len(requests) == 1 else None]

    with bm.Engine(Short(), "padded", threads=1) as engine:
        futures = [engine.submit(request) for request in ([1, 2], ["x"], [3], 7, [4, 5])]
        outcomes = [future.exception() or float(future.result()) for future in futures]
    assert [outcomes[i] for i in (0, 2, 4)] == [3.0, 3.0, 9.0]
    assert isinstance(outcomes[1], Exception)
    assert isinstance(outcomes[3], Exception)


def test_a_batched_that_returns_too_few_results_is_an_error_of_its_requests() -> None:
    class Short(Padded):
        def batched(self, requests: Any) -> list[Any]:
            return super().batched(requests)[1:]

    with bm.Engine(Short(), "padded", threads=1) as engine:
        futures = [engine.submit([n]) for n in range(3)]
        assert all("result" in str(future.exception(60)) for future in futures)


def test_a_stream_under_graph_batching_is_the_result_alone() -> None:
    with bm.Engine(Padded(), "padded", threads=1) as engine:
        assert [float(x) for x in engine.submit([1, 2], stream=True)] == [3.0]
        with pytest.raises(DeadlineError):
            engine.submit([1], deadline_ms=-1000).result()


def test_padded_needs_a_model_that_defines_batched() -> None:
    with pytest.raises(ModelError, match="batched"):
        bm.Engine(Sums(), "padded")

    class Unpaddable(Padded):
        can_pad = False

    with pytest.raises(ModelError, match="serial"):
        bm.Engine(Unpaddable(), "padded")
    bm.Engine(Unpaddable(), "serial").stop()


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="Did you mean 'cellular'"):
        bm.Engine(Sums(), "celular")


@pytest.mark.parametrize("options", [{"workers": 0}, {"threads": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        bm.Engine(Sums(), **options)


def test_calling_a_cell_outside_unfold_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"outside Model\.unfold"):
        Sums().add([1.0], [0.0])


def test_hidden_states_come_back_as_tensors_that_nothing_overwrites(modules: Any) -> None:
    class States(Translator):
        def unfold(self, source: list[int]) -> Any:
            h, _ = self.encoder.run(source)
            return h

    with bm.Engine(States(*modules), threads=1) as engine:
        first = engine.submit(SOURCES[0]).result()
        before = first.clone()
        engine.map(SOURCES * 5)
        assert first.shape == (HIDDEN,)
        assert torch.equal(first, before)
        assert not first.requires_grad
