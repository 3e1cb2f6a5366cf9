"""The networks of the papers as cells and unfold functions, by name; each is loaded at its first use."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from batchmaker.errors import unknown_name

if TYPE_CHECKING:
    from batchmaker.model.model import Model


class _Network(NamedTuple):
    """The class of a network, and the options of this name."""

    module: str
    name: str
    options: Mapping[str, Any]


def _network(module: str, name: str, **options: Any) -> _Network:
    return _Network(module, name, options)


_NETWORKS: Final = {
    "lstm": _network("recurrent", "LstmModel"),
    "gru": _network("recurrent", "GruModel"),
    "seq2seq": _network("seq2seq", "Seq2SeqModel"),
    "seq2seq-attention": _network("beam", "AttentionSeq2SeqModel"),
    # ED-Batch's code has a layer between a word's embedding and its LSTM. For inference it is another table of
    # embeddings.
    "lstm-nmt": _network("seq2seq", "Seq2SeqModel", vocabulary_size=17_191, hidden=256),
    "bilstm-tagger": _network("tagger", "BiLstmTaggerModel"),
    "bilstm-tagger-char": _network("tagger", "BiLstmTaggerModel", characters=True),
    "treelstm": _network("treelstm", "TreeLstmModel"),
    "treelstm-2type": _network("treelstm", "TreeLstm2TypeModel"),
    "treelstm-childsum": _network("childsum", "ChildSumModel"),
    "treegru": _network("treegru", "TreeGruModel"),
    "mvrnn": _network("mvrnn", "MvRnnModel"),
    "latticelstm": _network("lattice", "LatticeLstmModel"),
    "latticegru": _network("lattice", "LatticeGruModel"),
    "resnet50": _network("vision", "ResNet50Model"),
    "vgg16": _network("vision", "Vgg16Model"),
    "mobilenet": _network("vision", "MobileNetModel"),
    "bert": _network("bert", "BertModel"),
    "deepspeech2": _network("deepspeech2", "DeepSpeech2Model"),
    "gnmt": _network("gnmt", "GnmtModel"),
    "las": _network("las", "LasModel"),
    "transformer": _network("transformer", "TransformerModel"),
    "rwkv": _network("rwkv", "RwkvModel"),
    "mamba": _network("mamba", "MambaModel"),
    "rnnt": _network("rnnt", "RnntModel"),
    "early-exit": _network("early_exit", "EarlyExitModel"),
    "experts": _network("experts", "ExpertsModel"),
    "diffusion": _network("diffusion", "DiffusionModel"),
}


@final
class _Networks(Mapping[str, Callable[..., "Model"]]):
    """The factory of each network, by name."""

    def __getitem__(self, name: str) -> Callable[..., Model]:
        module, kind, options = _NETWORKS[name]
        make: Callable[..., Model] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
        return partial(make, **options) if options else make

    def __contains__(self, name: object) -> bool:
        return name in _NETWORKS

    def __iter__(self) -> Iterator[str]:
        return iter(_NETWORKS)

    def __len__(self) -> int:
        return len(_NETWORKS)


MODELS: Final[Mapping[str, Callable[..., Model]]] = _Networks()


def option_names(name: str) -> tuple[str, ...]:
    """Return the options of a model in order of definition. OptionError for an unknown name."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return tuple(inspect.signature(MODELS[name]).parameters)


def make(name: str, **options: Any) -> Model:
    """Return a new model by name. For an unknown name or option OptionError names the nearest one."""
    names = option_names(name)
    for option in options:
        if option not in names:
            raise unknown_name(f"option of model {name!r}", option, names)
    model = MODELS[name](**options)
    model.config = {**_NETWORKS[name].options, **options} if name in _NETWORKS else options
    return model


__all__ = ["MODELS", "make", "option_names"]
