"""Folders of weights in Hugging Face's layout: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from batchmaker.cost.profile import PROFILE
from batchmaker.errors import BatchmakerError, SavedModelError, said_by
from batchmaker.model.model import Model
from batchmaker.saved import plain
from batchmaker.saved.manifest import read_bytes
from batchmaker.saved.model_types import LOADERS, loader_of

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
OWN: Final = "batchmaker"
"""The key of config.json for what is no option, and the model_type of a folder that was written here."""
_OF_OTHERS: Final = (
    "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version",
)  # fmt: skip
"""Keys of other libraries that are options only of a constructor that names them."""
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
_SHARD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", re.ASCII)
_MOST_NAMED: Final = 8
_ADVICE: Final = "the folder is incomplete; copy it again"

Make = Callable[..., Model]
"""A class of models, or a function, that takes the options of config.json by name."""


def is_weights_folder(folder: Path) -> bool:
    """Whether the folder has config.json and weights."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def main_files(folder: Path) -> tuple[Path, ...]:
    """Return the files one of which changes when the model does."""
    return (folder / CONFIG, *sorted(folder.glob("*.safetensors")), *sorted(folder.glob(INDEX)))


# --- writing --------------------------------------------------------------------------------------------------------


def config_of(model: Model, class_path: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of config.json.

    config: the options of the constructor; None for `model.config`. SavedModelError if they are no plain data.
    """
    name = type(model).__name__
    config = model.config if config is None else config
    if not isinstance(config, Mapping) or not all(isinstance(option, str) for option in config):
        raise SavedModelError(
            f"{name}: its options are not known: expected a dict in model.config or save(..., config={{...}}), with "
            f"what {name}(...) is called with to make it again; got {type(config).__name__}"
        )
    clashes = {"architectures", "model_type", OWN} & set(config)
    if clashes:
        raise SavedModelError(
            f"{name}: config.json has keys {', '.join(sorted(clashes))} of its own; rename the option"
        )
    own: dict[str, Any] = {"class": class_path}
    if model.deadline_ms is not None:
        own["deadline_ms"] = model.deadline_ms
    options = {option: plain.to_json(value, f"config, {option}") for option, value in config.items()}
    return {"architectures": [name], "model_type": OWN, OWN: own, **options}


def write_weights(model: Model, folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, the weights and the profile into a folder that is there.

    SavedModelError if the model that config.json makes has other weights.
    """
    weights = weights_of(model)
    tensors: dict[str, Tensor] = {}
    for names in _same(weights):
        tensors[names[0]] = weights[names[0]].detach().cpu().contiguous()
    content = safetensors.torch.save(tensors, {"format": "pt"})
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    (folder / WEIGHTS).write_bytes(content)
    if model.profile is not None:
        model.profile.write(folder / PROFILE)


def weights_of(model: Model) -> dict[str, Tensor]:
    """Return what `saved_weights` gives. SavedModelError if it lacks a weight of a cell, which would not be loaded."""
    weights = model.saved_weights()
    addresses = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    for path, cell in model.cells.items():
        for name, tensor in cell.module.state_dict(keep_vars=True).items():
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in addresses:
                raise SavedModelError(
                    f"{type(model).__name__}: saved_weights() has not the weight {name!r} of cell {path!r}"
                )
    return weights


def _same(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor; several if it is tied."""
    names_at: dict[Any, list[str]] = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        names_at.setdefault(place if tensor.numel() else name, []).append(name)
    return list(names_at.values())


# --- loading --------------------------------------------------------------------------------------------------------


def load_weights_folder(folder: Path, make: Make | None, class_of: Callable[[str, str], type[Model]]) -> Model:
    """Return the model of a folder.

    make: see Make; None for the class in config.json, or the loader of its model_type. class_of: imports a class by its
    path, with the place for errors. SavedModelError for everything that is wrong with the folder, and if its weights
    are not exactly those of the model.
    """
    where = str(folder / CONFIG)
    config = _json(folder / CONFIG)
    own = config.get(OWN)
    if own is not None and not isinstance(own, dict):
        raise SavedModelError(f"{where}: {OWN} is {own!r}, expected an object")
    if make is None and own is not None:
        make = class_of(str(own.get("class")), where)
    if make is None:
        return _of_another_library(config, read_weights(folder), where)
    options = _options(config, make, where)
    try:
        model = make(**options)
    except BatchmakerError as error:
        raise SavedModelError(f"{where}: {_named(make)} refuses the options: {error}") from error
    except Exception as error:  # the class's own code
        raise SavedModelError(f"{where}: {_named(make)} raised {said_by(error)}") from error
    if not isinstance(model, Model):
        raise SavedModelError(f"{where}: {_named(make)} returned {type(model).__name__}, expected a batchmaker.Model")
    copy_weights(model, read_weights(folder), str(folder))
    if model.config is None:
        model.config = options
    if own is not None and "deadline_ms" in own:
        model.deadline_ms = _deadline(own["deadline_ms"], where)
    return model


def _deadline(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SavedModelError(f"{where}: deadline_ms is {value!r}, expected a number above 0")
    return float(value)


def _of_another_library(config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> Model:
    kind = config.get("model_type")
    loader = loader_of(kind) if isinstance(kind, str) else None
    if loader is None:
        made = f" ({', '.join(map(str, names))})" if isinstance(names := config.get("architectures"), list) else ""
        raise SavedModelError(
            f"{where}: no network here for model_type {kind!r}{made}; known: {', '.join(sorted(LOADERS)) or 'none'}. "
            "Write its cells as a class, and give it: bm.load(folder, Class)."
        )
    try:
        return loader(config, weights)
    except SavedModelError:
        raise
    except Exception as error:  # of a config that lacks something, or weights of another network
        raise SavedModelError(f"{where}: model_type {kind!r}: {said_by(error)}") from error


def _options(config: Mapping[str, Any], make: Make, where: str) -> dict[str, Any]:
    """Return what a constructor is called with. SavedModelError if it does not take all options, or lacks one."""
    parameters = inspect.signature(make).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [one.name for one in parameters if one.kind in by_name]
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    apart = {"architectures", "model_type", OWN} if OWN in config else {*_OF_OTHERS}
    options = {
        name: plain.from_json(value, f"{where}: {name}")
        for name, value in config.items()
        if name in names or (name not in apart)
    }
    unknown = [] if takes_all else [name for name in options if name not in names]
    missing = [
        one.name
        for one in parameters
        if one.kind in by_name and one.default is inspect.Parameter.empty and one.name not in options
    ]
    if unknown or missing:
        said = [f"has options that it does not take: {_few(unknown)}"] if unknown else []
        said += [f"lacks {_few(missing)}"] if missing else []
        raise SavedModelError(
            f"{where}: {_named(make)} takes {', '.join(names) or 'no options'}; config.json {' and '.join(said)}. Give "
            "a function that takes what it needs, as in bm.load(folder, lambda hidden_size, **_: Class(hidden_size))."
        )
    return options


def copy_weights(model: Model, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the model's own, by name, all or none. Floats are rounded to the model's dtype.

    SavedModelError lists names that are missing, unexpected, or of another shape or kind of number. Of a tied weight
    one name is enough; if there are several they must have the same values.
    """
    mine = weights_of(model)
    faults = [f"unexpected: {_few(unknown)}"] if (unknown := [name for name in weights if name not in mine]) else []
    missing, copies = list[str](), list[tuple[Tensor, Tensor]]()
    for names in _same(mine):
        sources, own = [name for name in names if name in weights], mine[names[0]]
        if not sources:
            missing.append(" = ".join(names))
            continue
        tensor = weights[sources[0]]
        if tensor.shape != own.shape or tensor.is_floating_point() != own.is_floating_point():
            faults.append(f"{sources[0]} is {_form(tensor)}, the model's {_form(own)}")
        faults += [
            f"{sources[0]} and {other} are one weight of the model, but have different values"
            for other in sources[1:]
            if not torch.equal(weights[other], tensor)
        ]
        copies.append((own, tensor))
    if missing:
        faults.insert(0, f"missing: {_few(missing)}")
    if faults:
        raise SavedModelError(f"{where}: the weights are not those of {type(model).__name__}; {'; '.join(faults)}")
    with torch.no_grad():
        for own, tensor in copies:
            own.copy_(tensor)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name: of model.safetensors, or of the shards that the index names."""
    if (folder / WEIGHTS).is_file():
        return _tensors(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        pickled = [name for name in _PICKLES if (folder / name).exists()]
        advice = (
            f"{pickled[0]} is a pickle, which is never read; save_pretrained(folder) writes safetensors"
            if pickled
            else _ADVICE
        )
        raise SavedModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}: {advice}")
    index = _json(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise SavedModelError(f"{folder / INDEX}: has no weight_map of names to files")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if not _SHARD.fullmatch(file):
            raise SavedModelError(
                f"{folder / INDEX}: file name {file!r} is refused: it must be a plain name of safetensors in the folder"
            )
        shard = _tensors(folder / file)
        wanted = [name for name, place in places.items() if place == file]
        if set(shard) != set(wanted):
            apart = sorted(set(shard) ^ set(wanted))
            raise SavedModelError(f"{folder / file}: has not the weights that {INDEX} names: {_few(apart)}. {_ADVICE}")
        weights.update(shard)
    return weights


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():  # a pipe would never end
        raise SavedModelError(f"{path}: there is no such file: {_ADVICE}")
    try:
        return dict(safetensors.torch.load_file(os.fspath(path)))
    except Exception as error:  # besides SafetensorError a bad header can raise nearly anything
        raise SavedModelError(f"{path}: cannot be read ({type(error).__name__}: {error}): {_ADVICE}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(read_bytes(path, _ADVICE))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SavedModelError(f"{path}: malformed: {error}") from None
    if not isinstance(content, dict):
        raise SavedModelError(f"{path}: got {type(content).__name__}, expected an object")
    return content


def _few(names: Iterable[str]) -> str:
    """Return the first names, and how many there are more."""
    listed = list(names)
    shown = ", ".join(itertools.islice(listed, _MOST_NAMED))
    return shown if len(listed) <= _MOST_NAMED else f"{shown} and {len(listed) - _MOST_NAMED} more"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _named(make: Make) -> str:
    return getattr(make, "__name__", type(make).__name__)
