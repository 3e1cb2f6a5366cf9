"""Who waits for the engine in its own thread gets an error at once, and everybody else an answer."""

import threading

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import OptionError

SAID = "in the engine's own thread"


class Asks(bm.Model):
    """Its `unfold` waits for another request if the first number says how."""

    engine: bm.Engine

    def __init__(self):
        torch.manual_seed(0)
        self.cell = bm.Cell(nn.Linear(2, 2))

    def unfold(self, request):
        how, row = request["how"], request["row"]
        other = {"how": "", "row": row}
        if how == "map":
            return self.engine.map([other], progress=False)
        if how == "result":
            return self.engine.submit(other).result()
        if how == "exception":
            return self.engine.submit(other).exception(5)
        if how == "stream":
            return list(self.engine.submit(other, stream=True))
        return self.cell(row)


@pytest.fixture
def asked():
    model = Asks()
    with bm.Engine(model, threads=1) as model.engine:
        yield model.engine, model


def request(how=""):
    return {"how": how, "row": [1.0, 2.0]}


@pytest.mark.parametrize("how", ["map", "result", "exception", "stream"])
def test_an_unfold_function_that_waits_for_its_engine_fails_and_the_next_request_is_answered(asked, how):
    engine, model = asked
    with pytest.raises(bm.errors.BatchmakerError, match=SAID):
        engine.submit(request(how)).result(60)
    with torch.no_grad():
        wanted = model.cell.module(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(engine.submit(request()).result(60), wanted)


def test_a_callback_that_waits_for_its_engine_gets_an_error_and_may_submit():
    engine_is_free, called, raised, more = threading.Event(), threading.Event(), [], []

    class Waits(Asks):
        def unfold(self, request):
            assert engine_is_free.wait(60)  # so that the callback is there before the answer
            return super().unfold(request)

    def ask(_):
        more.append(engine.submit(request()))
        with pytest.raises(TimeoutError):
            more[0].result(timeout=0)  # does not wait
        with pytest.raises(OptionError, match=SAID) as found:
            more[0].result()
        raised.append(found.value)
        called.set()

    with bm.Engine(Waits(), threads=1) as engine:
        answer = engine.submit(request())
        answer.add_done_callback(ask)
        engine_is_free.set()
        assert called.wait(60)
        assert more[0].result(60).shape == (2,)
