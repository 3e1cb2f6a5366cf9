"""The networks of the papers as cells and unfold functions, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from batchmaker.cells.model import Model
from batchmaker.errors import unknown_name
from batchmaker.models.bert import BertModel
from batchmaker.models.deepspeech2 import DeepSpeech2Model
from batchmaker.models.gnmt import GnmtModel
from batchmaker.models.las import LasModel
from batchmaker.models.lattice import LatticeGruModel, LatticeLstmModel
from batchmaker.models.mvrnn import MvRnnModel
from batchmaker.models.recurrent import GruModel, LstmModel
from batchmaker.models.reference import reference
from batchmaker.models.seq2seq import Seq2SeqModel
from batchmaker.models.tagger import BiLstmTaggerModel
from batchmaker.models.transformer import TransformerModel
from batchmaker.models.treegru import TreeGruModel
from batchmaker.models.treelstm import TreeLstm2TypeModel, TreeLstmModel
from batchmaker.models.vision import MobileNetModel, ResNet50Model, Vgg16Model

MODELS: dict[str, Callable[..., Model]] = {
    "lstm": LstmModel,
    "gru": GruModel,
    "seq2seq": Seq2SeqModel,
    # ED-Batch's code has a layer between a word's embedding and its LSTM: for inference, another table of embeddings.
    "lstm-nmt": partial(Seq2SeqModel, vocabulary_size=17_191, hidden=256),
    "bilstm-tagger": BiLstmTaggerModel,
    "bilstm-tagger-char": partial(BiLstmTaggerModel, characters=True),
    "treelstm": TreeLstmModel,
    "treelstm-2type": TreeLstm2TypeModel,
    "treegru": TreeGruModel,
    "mvrnn": MvRnnModel,
    "latticelstm": LatticeLstmModel,
    "latticegru": LatticeGruModel,
    "resnet50": ResNet50Model,
    "vgg16": Vgg16Model,
    "mobilenet": MobileNetModel,
    "bert": BertModel,
    "deepspeech2": DeepSpeech2Model,
    "gnmt": GnmtModel,
    "las": LasModel,
    "transformer": TransformerModel,
}


def option_names(name: str) -> tuple[str, ...]:
    """Return the options of a model in order of definition. OptionError for an unknown name."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return tuple(inspect.signature(MODELS[name]).parameters)


def make(name: str, **options: Any) -> Model:
    """Return a new model by name. OptionError names the nearest if the name or an option is not known."""
    known = option_names(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of model {name!r}", option, known)
    return MODELS[name](**options)


__all__ = [
    "MODELS",
    "BertModel",
    "BiLstmTaggerModel",
    "DeepSpeech2Model",
    "GnmtModel",
    "GruModel",
    "LasModel",
    "LatticeGruModel",
    "LatticeLstmModel",
    "LstmModel",
    "MobileNetModel",
    "MvRnnModel",
    "ResNet50Model",
    "Seq2SeqModel",
    "TransformerModel",
    "TreeGruModel",
    "TreeLstm2TypeModel",
    "TreeLstmModel",
    "Vgg16Model",
    "make",
    "option_names",
    "reference",
]
