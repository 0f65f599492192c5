"""From the name of a checkpoint to an order to take its weights, or a refusal."""

from __future__ import annotations

from dataclasses import fields

from unisono.launcher.model_source import read_source_config, resolve_model
from unisono.launcher.resolve import check_checkpoint
from unisono.models.config import ConfigError, ModelConfig
from unisono.models.headers import CheckpointError
from unisono.models.partition import ModelPartition
from unisono.runtime.protocol import Reload
from unisono.workers.config import WorkerConfig

_FREE = ("dtype", "bos_token_id", "eos_token_ids")
"""Of a ModelConfig: what weights of the same architecture and shapes may differ in."""
_OF_DRAFTS = ("num_mtp_layers", "mtp_embedding", "mtp_head")
"""What they may differ in, too, where nothing drafts: tuned weights often come without."""


def reload_order(name: str, worker: WorkerConfig) -> Reload:
    """Return the order to take the weights of `name`, a model as `LLM` takes it.

    They come from its files; random ones for a shape, and for the model that `worker` began with
    where its own are random. Raises CheckpointError, in one line, where there are no such weights
    or they are of another model.
    """
    try:
        source = resolve_model(name)
        own = str(source.path) == worker.model_path
        load_format = worker.load_format if own else "auto"
        if source.kind == "shape":
            load_format = "random"
        model = read_source_config(source, load_format)
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    _check_same(name, model, worker)
    if load_format != "random":
        check_checkpoint(
            source.path, ModelPartition.of(worker.model, worker.tp, drafts=worker.num_drafts > 0)
        )
    return Reload(path=str(source.path), load_format=load_format)


def _check_same(name: str, wanted: ModelConfig, worker: WorkerConfig) -> None:
    free = _FREE if worker.num_drafts else (*_FREE, *_OF_DRAFTS)
    for field in fields(ModelConfig):
        mine, theirs = getattr(worker.model, field.name), getattr(wanted, field.name)
        if field.name == "num_mtp_layers" and mine and theirs:
            continue  # the first of them drafts alone
        if field.name not in free and mine != theirs:
            raise CheckpointError(
                f"{name}: {field.name} is {theirs!r}, and the model that runs has {mine!r}: "
                "choose weights of the same architecture and shapes, or start another LLM"
            )
