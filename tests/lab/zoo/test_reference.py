"""The oracle agrees with torch's own layers and with recursion written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.lab.zoo.reference import reference

WORDS = [3, 1, 4, 1, 5, 9]


@pytest.mark.parametrize(("name", "layers_of"), [("lstm", nn.LSTM), ("gru", nn.GRU)])
def test_reference_of_a_stack_is_torch_s_own_layers(name, layers_of):
    model = zoo.make(name, vocabulary_size=10, hidden=8, embedding=6, layers=2)
    stack = model.step.module
    layers = layers_of(6, 8, 2)
    for number, cell in enumerate(stack.layers):
        for key, weight in cell.named_parameters():
            getattr(layers, f"{key}_l{number}").data.copy_(weight)
    with torch.no_grad():
        expected = layers(stack.embedding(torch.tensor(WORDS)))[0][-1]
    torch.testing.assert_close(reference(model, WORDS), expected)


def test_reference_of_a_tree_is_the_equations_by_hand():
    model = zoo.make("treelstm", vocabulary_size=10, hidden=8)
    leaf, inner = model.leaf.module, model.inner.module
    children = [[0, 1], [6, 2], [3, 4], [8, 5], [7, 9]]

    def node(number):
        if number < len(WORDS):
            i, o, u = (leaf.gates.weight @ leaf.embedding.weight[WORDS[number]] + leaf.gates.bias).split(8)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (h1, c1), (h2, c2) = map(node, children[number - len(WORDS)])
        both = torch.cat([inner.left.weight[8:], inner.right.weight[8:]], 1)
        i, o, u = (both @ torch.cat([h1, h2]) + inner.left.bias[8:] + inner.right.bias[8:]).split(8)
        f1 = (inner.left.weight[:8] @ h1 + inner.left.bias[:8]).sigmoid()
        f2 = (inner.right.weight[:8] @ h2 + inner.right.bias[:8]).sigmoid()
        c = i.sigmoid() * u.tanh() + f1 * c1 + f2 * c2
        return o.sigmoid() * c.tanh(), c

    result = reference(model, {"words": WORDS, "children": children})
    torch.testing.assert_close(result, node(10)[0])


def test_reference_of_translation_is_a_loop_by_hand():
    model = zoo.make("seq2seq", vocabulary_size=12, hidden=8)
    (encoder,), embed = model.encoder.module.layers, model.encoder.module.embedding
    decoder = model.decoder.module
    with torch.no_grad():
        h = c = torch.zeros(1, 8)
        for word in WORDS:
            h, c = encoder(embed(torch.tensor([word])), (h, c))
        words, word = [], torch.tensor([1])
        for _ in range(10):
            h, c = decoder.stack.layers[0](decoder.stack.embedding(word), (h, c))
            word = (decoder.project.weight @ h[0] + decoder.project.bias).argmax()[None]
            words.append(int(word))
    assert reference(model, {"source": WORDS, "words": 10}).tolist() == words
    stopped = words[: words.index(2) + 1] if 2 in words else words
    assert reference(model, WORDS).tolist()[: len(stopped)] == stopped


class Half(bm.Model):
    """Begins with one part of its state given and the other zero."""

    def __init__(self):
        self.lstm = bm.Cell(nn.LSTMCell(1, 2))

    def unfold(self, request):
        return self.lstm.run(request, (torch.tensor([1.0, -2.0]), None))[0]


def test_a_part_of_the_first_state_that_is_none_is_zero():
    model = Half()
    x, lstm = torch.tensor([[0.5], [2.0]]), model.lstm.module
    with torch.no_grad():
        h, c = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)
        for step in x:
            h, c = lstm(step[None], (h, c))
    torch.testing.assert_close(reference(model, x), h[0])
    with bm.Engine(model, threads=1) as engine:
        torch.testing.assert_close(engine.submit(x).result(), h[0])


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.one


class Waits(bm.Model):
    """Uses what the oracle must interpret: single calls, maps, loops that end, and waiting in between."""

    def __init__(self):
        self.count = bm.Cell(Count())

    def unfold(self, request):
        x = self.count(torch.tensor([float(request)]))
        while (yield x)[0] < 5:
            x = self.count(x)
        ended = self.count.loop(x, until=lambda values: values[:, 0] >= 8, max_steps=10)
        after = self.count(ended)
        return {"steps": ended.steps, "after": after, "map": self.count.map([after, after])}


def test_reference_interprets_waiting_loops_that_end_and_maps():
    result = reference(Waits(), 2)
    assert result["steps"].tolist() == [[6], [7], [8]]
    assert result["after"].tolist() == [9]
    assert result["map"].tolist() == [[10], [10]]
