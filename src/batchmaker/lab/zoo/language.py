"""Common parts of recurrent language models: requests, cells that read a prompt and write tokens, padded batches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.padding import NetworkModel, pad
from batchmaker.lab.zoo.parts import DTYPES, checked_tokens, frozen
from batchmaker.lab.zoo.translation import write
from batchmaker.model.cell import Cell
from batchmaker.sampling import Sampler

if TYPE_CHECKING:
    from batchmaker.server import Completions

MAX_TOKENS: Final = 16
_TOKEN: Final = ValueSpec((), "int64")
_NUMBER: Final = ValueSpec((), "float32")


class StatePart(NamedTuple):
    """A row of a network's state at its start: its shape, its dtype and the number that it is full of."""

    shape: tuple[int, ...]
    dtype: str
    filled: float = 0.0


class LanguageNetwork(nn.Module):
    """A network of blocks, forward(x, *own parts of the state) -> (x, *own parts).

    A block's `whole` is the same for x of all steps of sequences [n, steps, hidden]; after x comes the place of the
    last step of each, [n]. It returns x, and the state after that step.

    parts: the state, a row for each part; every block has as many.
    """

    vocabulary_size: int
    parts: tuple[StatePart, ...]
    embeddings: nn.Embedding
    blocks: nn.ModuleList

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Return the scores of the next token [..., vocabulary_size]."""

    def through(
        self, tokens: Tensor, state: Sequence[Tensor], last: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step through all blocks: tokens [n], the state -> x [n, hidden], the state.

        With tokens [n, steps] all steps of whole sequences, block by block: x [n, steps, hidden], and the state after
        the step `last` of each, [n]; by default the last one.
        """
        x, after = self.embeddings(tokens), list[Tensor]()
        each = len(self.parts) // len(self.blocks)
        if tokens.dim() == 2 and last is None:
            last = torch.full((len(tokens),), tokens.shape[1] - 1)
        for number, block in enumerate(self.blocks):
            mine, whole = state[number * each : (number + 1) * each], cast(Any, block).whole
            x, *own = block(x, *mine) if last is None else whole(x, last, *mine)
            after += own
        return x, tuple(after)

    def start(self, count: int) -> list[Tensor]:
        """Return the state of `count` texts before their first token."""
        return [torch.full((count, *part.shape), part.filled, dtype=DTYPES[part.dtype]) for part in self.parts]


@final
class ReadStep(nn.Module):
    """forward(token, *state) -> state: a token of a prompt, whose scores nobody needs."""

    def __init__(self, network: LanguageNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return self.network.through(token, state)[1]


@final
class ReadWhole(nn.Module):
    """forward(tokens [n, room], number [n], *state) -> state: whole prompts (see `whole` of a cell)."""

    def __init__(self, network: LanguageNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, number: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return self.network.through(tokens, state, number - 1)[1]


@final
class WriteStep(nn.Module):
    """forward(token, *state) -> (next token, *state): the likeliest token."""

    def __init__(self, network: LanguageNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x, after = self.network.through(token, state)
        return self.network.head(x).argmax(-1), *after


@final
class DrawStep(nn.Module):
    """forward(token, *state, seed, step, temperature, top_k, top_p) -> (next token, the same): a token drawn."""

    def __init__(self, network: LanguageNetwork) -> None:
        super().__init__()
        self.network, self.sample = network, Sampler()

    def forward(self, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        *state, seed, step, temperature, top_k, top_p = inputs
        x, after = self.network.through(token, state)
        chosen = self.sample(self.network.head(x), seed, step, temperature, top_k, top_p)
        return chosen, *after, seed, step + 1, temperature, top_k, top_p


@final
@dataclass(frozen=True, slots=True)
class Prompt:
    """The content of a request: see LanguageModel. until: the token that ends the text, if any."""

    tokens: NDArray[np.int64]
    max_tokens: int
    until: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int


class LanguageModel(NetworkModel):
    """A recurrent language model: goes on with a prompt; the tokens stream.

    A request is a list of token ids, or a dict with `prompt` and any of

    - max_tokens: the most to write, 16;
    - temperature: 0, the default, takes the likeliest token; otherwise tokens are drawn;
    - top_k, top_p: which tokens are drawn from, as in `bm.sampling`: 0 and 1.0, all;
    - seed: of the drawing, 0; the same seed gives the same tokens;
    - ignore_eos: True goes on to max_tokens in any case.

    The result is the new tokens, int64 [n], the end token included. Greedy and drawn tokens are written by two cells,
    so that greedy requests do not wait for sorted scores; a third one reads prompts, without a head.

    With a tokenizer, whose `encode` makes tokens of a text and whose `decode` a text of tokens, a server answers
    /v1/completions: `model.tokenizer = ...`, or `of(model, tokenizer=...)`. It is not saved with the model.

    Options that all have: eos: the token that ends a text (None: no such token). dtype: float32, bfloat16 or float16.
    max_batch: most rows of one cell call. seed: of the random weights.
    """

    optional_inputs = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
    sole_input = "prompt"
    _network: LanguageNetwork

    def __init__(self, network: LanguageNetwork, eos: int | None, dtype: str, max_batch: int) -> None:
        if eos is not None and not 0 <= eos < network.vocabulary_size:
            raise OptionError(f"eos must be None or a token of 0..{network.vocabulary_size - 1}, got {eos}")
        self._network = cast(LanguageNetwork, frozen(network, dtype))
        rows = (_TOKEN, *(ValueSpec(part.shape, part.dtype) for part in network.parts))
        more = (_TOKEN, _TOKEN, _NUMBER, _TOKEN, _NUMBER)
        self.read = Cell(
            ReadStep(network), max_batch=max_batch, declared=Declared(rows, rows[1:]), whole=ReadWhole(network)
        )
        self.write, self.draw = (
            Cell(module, max_batch=max_batch, priority=1, host_outputs=(0,), declared=Declared(own, own))
            for module, own in ((WriteStep(network), rows), (DrawStep(network), (*rows, *more)))
        )
        self.tokenizer: Any = None
        self.vocabulary_size, self.eos = network.vocabulary_size, eos
        self.parts: list[list[Any]] = [list(part) for part in network.parts]
        self._begin()
        greedy = {"prompt": [0, 0], "max_tokens": 2, "ignore_eos": False}
        self.example_request = {**greedy, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
        self.example_requests = [greedy]

    def _begin(self) -> None:
        self._initial = [
            torch.full(tuple(shape), filled, dtype=DTYPES[dtype]) if filled else None
            for shape, dtype, filled in self.parts
        ]

    def saved_state(self) -> dict[str, Any]:
        return {name: value for name, value in super().saved_state().items() if name != "tokenizer"}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.tokenizer = None
        self._begin()

    def serving_completions(self) -> Completions | None:
        """Return how a server answers completions, if there is a tokenizer."""
        if self.tokenizer is None:
            return None
        from batchmaker.server import Completions

        return Completions(self.tokenizer.encode, self.tokenizer.decode, self.eos)

    def unfold(self, request: Any) -> Any:
        """Return the tokens that follow a prompt, int64 [n]: up to its `until`, and `max_tokens` at most."""
        order = self._parse(request)
        state: Sequence[Any] = self._initial
        if len(order.tokens) > 1:
            state = self.read.run(order.tokens[:-1], state)
        begin = (order.tokens[-1], *state)
        if order.temperature == 0:
            words = self.write.loop(begin, until=order.until, max_steps=order.max_tokens)[0]
        else:
            drawing = (order.seed, 0, order.temperature, order.top_k, order.top_p)
            words = self.draw.loop((*begin, *drawing), until=order.until, max_steps=order.max_tokens)[0]
        return words.steps

    def length(self, request: Any) -> int:
        return len(self._parse(request).tokens)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Read the padded prompts, then write until the last row ends; each keeps its own tokens."""
        network: LanguageNetwork = self._need_network()
        orders = [self._parse(request) for request in requests]
        tokens, lengths = pad([order.tokens for order in orders])
        state = network.start(len(orders))
        with torch.no_grad():
            for number, row in enumerate(tokens[:-1]):
                reads = number < lengths - 1
                after = network.through(row, state)[1]
                state = [
                    torch.where(reads.view(-1, *(1,) * (old.dim() - 1)), new, old)
                    for new, old in zip(after, state, strict=True)
                ]
            choose = _chooser(orders)

            def step(token: Tensor) -> Tensor:
                x, state[:] = network.through(token, state)
                return choose(network.head(x))

            last = tokens.gather(0, lengths[None] - 1)[0]
            return write(step, [order.max_tokens for order in orders], [order.until for order in orders], last)

    def _parse(self, request: Any) -> Prompt:
        fields: Mapping[str, Any] = request if isinstance(request, Mapping) else {"prompt": request}
        unknown = [str(key) for key in fields if key != "prompt" and key not in self.optional_inputs]
        if unknown or "prompt" not in fields:
            raise InvalidRequestError(
                f"a request is token ids, or a dict with 'prompt' and any of {', '.join(self.optional_inputs)}; "
                f"got the keys {sorted(map(str, fields))}"
            )
        return Prompt(
            tokens=checked_tokens(fields["prompt"], self.vocabulary_size, "the prompt"),
            max_tokens=_whole(fields, "max_tokens", MAX_TOKENS, 1),
            until=None if fields.get("ignore_eos", False) else self.eos,
            temperature=_number(fields, "temperature", 0.0, math.inf),
            top_k=_whole(fields, "top_k", 0, -1),
            top_p=_number(fields, "top_p", 1.0, 1.0),
            seed=_whole(fields, "seed", 0, -(1 << 63)),
        )


def _chooser(orders: Sequence[Prompt]) -> Callable[[Tensor], Tensor]:
    """Return what gives each row's next token from its scores [n, tokens]."""
    if all(order.temperature == 0 for order in orders):
        return lambda scores: scores.argmax(-1)
    seed, top_k = (torch.tensor([getattr(order, name) for order in orders]) for name in ("seed", "top_k"))
    temperature, top_p = (torch.tensor([getattr(order, name) for order in orders]) for name in ("temperature", "top_p"))
    sampler, steps = Sampler(), iter(range(1 << 62))

    def choose(scores: Tensor) -> Tensor:
        chosen: Tensor = sampler(scores, seed, torch.full_like(seed, next(steps)), temperature, top_k, top_p)
        return chosen

    return choose


def _whole(fields: Mapping[str, Any], name: str, default: int, least: int) -> int:
    """Return an option that is a whole number. InvalidRequestError if it is none, or outside least..2^63 - 1."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 1 << 63:
        raise InvalidRequestError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def _number(fields: Mapping[str, Any], name: str, default: float, most: float) -> float:
    """Return an option that is a number. InvalidRequestError if it is none, below 0, infinite or above `most`."""
    value = fields.get(name, default)
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most or value == math.inf:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise InvalidRequestError(f"{name} must be a number of at least 0{limit}, got {value!r}")
    return float(value)


def config_and_weights(model: Any, body: str, head: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of a model of the library transformers, which has these attributes.

    ModelError if it has not.
    """
    absent = [name for name in (body, head, "config") if not hasattr(model, name)]
    if absent or not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a model of transformers with a {body} and a {head}; got {type(model).__name__}, which has no "
            f"{', '.join(absent) or 'weights'}"
        )
    config: Any = model.config
    return config.to_dict(), model.state_dict()


@final
class TheirWeights:
    """The weights of a language model of the library transformers by the names that networks here have.

    Without the body's prefix; the head's is `lm_head`, and the embeddings' if there is none. ModelError where one is
    not there.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], body: str, head: str) -> None:
        self.by_name = {name.removeprefix(f"{body}."): weight for name, weight in weights.items()}
        tied = self.by_name.get("embeddings.weight")
        self._config, self._body = config, body
        lm_head = self.by_name.pop(f"{head}.weight", tied)
        if lm_head is not None:
            self.by_name["lm_head.weight"] = lm_head

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        if name not in self.by_name:
            raise ModelError(f"the weights lack {self._body}.{name}: they are of another network")
        return tuple(self.by_name[name].shape)

    def sizes(self) -> dict[str, Any]:
        """Return the options that all have: sizes, epsilon and the end token. The rest of config.json has defaults."""
        vocabulary_size, hidden = self.shape("embeddings.weight")
        eos = self._config.get("eos_token_id", 0)
        if isinstance(eos, list):
            raise ModelError(f"the model has the end tokens {eos}; set eos_token_id of its config to one")
        layers = {name.split(".")[1] for name in self.by_name if name.startswith(("blocks.", "layers."))}
        epsilon = self._config.get("layer_norm_epsilon", 1e-5)
        return {
            "vocabulary_size": vocabulary_size,
            "hidden": hidden,
            "layers": len(layers),
            "epsilon": epsilon,
            "eos": eos,
        }

    def copy_into(self, network: nn.Module) -> None:
        """Give the network these weights."""
        try:
            network.load_state_dict(self.by_name)
        except RuntimeError as error:
            raise ModelError(f"the weights are of another network: {error}") from error
