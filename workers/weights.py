"""The weights of a rank: their one owner, which loads them, drops them and loads others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from unisono.models.headers import describe_ignored, group_ignored
from unisono.models.interface import (
    Build,
    Caches,
    ForwardBatch,
    LayerCache,
    LoadableModel,
    Model,
)
from unisono.models.ledger import fill_weights
from unisono.models.overlay import parse_overlay
from unisono.models.partition import ModelPartition
from unisono.models.random_weights import open_weights
from unisono.models.registry import model_class
from unisono.workers.config import WorkerConfig
from unisono.workers.device import give_back
from unisono.workers.reporter import Reporter

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 0.1


class Weights:
    """A rank's part of a model with the weights that it has now: a `Model` for whoever computes.

    The model is built anew for each load, so that nothing of the former weights can stay.
    `generation` counts loads, as that of a `KVCache` counts allocations.
    """

    def __init__(
        self, config: WorkerConfig, partition: ModelPartition, build: Build, report: Reporter
    ) -> None:
        self.config = config.model
        self.generation = 0
        self._worker, self._partition = config, partition
        self._build, self._report = build, report
        self._model: Model | None = None

    def load(self, path: str, load_format: str) -> None:
        """Take the weights of `path`, after what is there is given back.

        At the most there is one set of weights, and one of its tensors twice while it is packed.
        Raises CheckpointError, and then there are none.
        """
        self.drop()
        self._report.enter("load weights")
        worker, build = self._worker, self._build
        model: LoadableModel = model_class(self.config.family)(
            build, self._partition, worker.max_model_len
        )
        specs = list(self._partition.weights(build.group.rank))
        parts = parse_overlay(worker.overlay, self.config)
        with open_weights(path, load_format, parts, build.dtype) as source:
            read = {spec.name for spec in specs}
            ignored = [name for name in source.names if name not in read]
            if ignored and build.group.rank == 0:
                log.info("ignored: %s", describe_ignored(group_ignored(ignored)))
            fill_weights(specs, model.targets(), source, self._throttled_progress())
        self._report.enter("pack weights")
        with torch.inference_mode():
            model.pack()
        self._model = model
        self.generation += 1

    def drop(self) -> None:
        """Give the memory back."""
        self._model = None
        give_back(self._build.device)

    def forward(self, batch: ForwardBatch, caches: Caches) -> Tensor:
        """As `Model.forward`."""
        return self._loaded.forward(batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Model.logits`."""
        return self._loaded.logits(hidden)

    def draft(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """As `Model.draft`."""
        return self._loaded.draft(token_ids, hidden, batch, cache)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """As `Model.draft_logits`."""
        return self._loaded.draft_logits(hidden)

    @property
    def _loaded(self) -> Model:
        assert self._model is not None, "a step without weights"
        return self._model

    def _throttled_progress(self) -> Callable[[int, int], None]:
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last > _PROGRESS_EVERY_S:
                last = now
                self._report.progress(done, total)

        return report
