"""The keywords of each function and their types, for type checkers. A test compares them with the command line."""

# Written by tests/settings.py.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Union

Path = Union[str, "os.PathLike[str]"]
Row = Union[str, Sequence[int], Mapping[str, Any]]
Dataset = Union[Iterable[Row], "MapStyle"]
Data = Union[Path, Dataset, Mapping[str, Dataset]]
Model = Union[Path, Sequence[Path], "ModuleChain"]
Metric = Union[str, Callable[[str, str, str], float]]
Prompts = Union[Path, Sequence[Row]]


class MapStyle(Protocol):
    """A map-style dataset of PyTorch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ModuleChain(Protocol):
    """A ``hydra_train.torch.Chain``, whose types need PyTorch."""

    @property
    def modules(self) -> Mapping[str, Any]: ...


class Select(TypedDict, total=False):
    model: Model | None
    data: Data | None
    task: str | None
    loss: str | None
    beta: float | Sequence[float] | None
    gamma: float | Sequence[float] | None
    problem_type: str | None
    columns: str | Sequence[str] | None
    context: int | Sequence[int] | None
    loss_on: str | None
    pack: bool | None
    tokenizer: str | None
    dropout: float | Sequence[float] | None
    vocabulary_parts: int | None
    train: str | Sequence[str] | None
    dtype: str | None
    frozen_dtype: str | None
    seed: int | Sequence[int] | None
    batch: int | Sequence[int] | None
    lr: float | Sequence[float] | None
    accumulate: int | Sequence[int] | None
    epochs: int | Sequence[int] | None
    steps: int | Sequence[int] | None
    optimizer: str | Sequence[str] | None
    weight_decay: float | Sequence[float] | None
    no_decay_norms: bool | None
    clip: float | Sequence[float] | None
    schedule: str | Sequence[str] | None
    warmup: float | Sequence[float] | None
    decay_steps: int | Sequence[int] | None
    decay_to: float | Sequence[float] | None
    no_shuffle: bool | None
    eval_every: int | None
    eval_at: int | Sequence[int] | None
    patience: int | None
    metric: Metric | None
    eval_limit: int | None
    sample_prompts: Prompts | None
    sample_tokens: int | None
    no_initial_validation: bool | None
    lora: int | Sequence[int] | None
    lora_alpha: float | Sequence[float] | None
    lora_dropout: float | Sequence[float] | None
    lora_targets: str | Sequence[str] | None
    rslora: bool | None
    modules_to_save: str | Sequence[str] | None
    adapter: Path | None
    base: str | None
    merge: bool | None
    search: str | None
    sample: str | Sequence[str] | Mapping[str, Any] | None
    space: Path | None
    trials: int | None
    trials_file: Path | None
    eta: int | None
    first_rung: int | None
    workers: int | None
    interval: int | None
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None
    keep_best: int | None
    save_dtype: str | None
    part: str | None
    only: str | Sequence[str] | None
    out: Path | None
    force: bool | None
    dry_run: bool | None
    record: Path | None
    progress: str | None
    serve: str | None
    tensorboard: Path | None
    mlflow: str | None
    checkpoint_every: int | str | None
    spec: Path | None
    replay: Path | None


class Train(TypedDict, total=False):
    model: Model | None
    data: Data | None
    task: str | None
    loss: str | None
    beta: float | None
    gamma: float | None
    problem_type: str | None
    columns: str | Sequence[str] | None
    context: int | None
    loss_on: str | None
    pack: bool | None
    tokenizer: str | None
    dropout: float | None
    vocabulary_parts: int | None
    train: str | Sequence[str] | None
    dtype: str | None
    frozen_dtype: str | None
    seed: int | None
    accumulate: int | None
    epochs: int | None
    steps: int | None
    optimizer: str | None
    weight_decay: float | None
    no_decay_norms: bool | None
    clip: float | None
    schedule: str | None
    warmup: float | None
    decay_steps: int | None
    decay_to: float | None
    no_shuffle: bool | None
    eval_every: int | None
    eval_at: int | Sequence[int] | None
    patience: int | None
    metric: Metric | None
    eval_limit: int | None
    sample_prompts: Prompts | None
    sample_tokens: int | None
    no_initial_validation: bool | None
    lora_alpha: float | None
    lora_dropout: float | None
    lora_targets: str | Sequence[str] | None
    rslora: bool | None
    modules_to_save: str | Sequence[str] | None
    adapter: Path | None
    base: str | None
    merge: bool | None
    search: str | None
    sample: str | Sequence[str] | Mapping[str, Any] | None
    space: Path | None
    trials: int | None
    trials_file: Path | None
    eta: int | None
    first_rung: int | None
    workers: int | None
    interval: int | None
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None
    keep_best: int | None
    save_dtype: str | None
    out: Path | None
    force: bool | None
    dry_run: bool | None
    record: Path | None
    progress: str | None
    serve: str | None
    tensorboard: Path | None
    mlflow: str | None
    checkpoint_every: int | str | None
    batch: int | None
    lr: float | None
    lora: int | None


class Resume(TypedDict, total=False):
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None
    checkpoint_every: int | str | None
    record: Path | None
    progress: str | None
    serve: str | None
    tensorboard: Path | None
    mlflow: str | None


class Evaluate(TypedDict, total=False):
    model: Model | None
    data: Data | None
    task: str | None
    loss: str | None
    beta: float | None
    gamma: float | None
    problem_type: str | None
    columns: str | Sequence[str] | None
    context: int | None
    loss_on: str | None
    pack: bool | None
    tokenizer: str | None
    dropout: float | None
    vocabulary_parts: int | None
    train: str | Sequence[str] | None
    dtype: str | None
    frozen_dtype: str | None
    seed: int | None
    adapter: Path | None
    base: str | None
    split: str | None
    batch: int | None
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None


class Explain(TypedDict, total=False):
    model: Model | None
    data: Data | None
    task: str | None
    loss: str | None
    beta: float | Sequence[float] | None
    gamma: float | Sequence[float] | None
    problem_type: str | None
    columns: str | Sequence[str] | None
    context: int | Sequence[int] | None
    loss_on: str | None
    pack: bool | None
    tokenizer: str | None
    dropout: float | Sequence[float] | None
    vocabulary_parts: int | None
    train: str | Sequence[str] | None
    dtype: str | None
    frozen_dtype: str | None
    seed: int | Sequence[int] | None
    accumulate: int | Sequence[int] | None
    epochs: int | Sequence[int] | None
    steps: int | Sequence[int] | None
    optimizer: str | Sequence[str] | None
    weight_decay: float | Sequence[float] | None
    no_decay_norms: bool | None
    clip: float | Sequence[float] | None
    schedule: str | Sequence[str] | None
    warmup: float | Sequence[float] | None
    decay_steps: int | Sequence[int] | None
    decay_to: float | Sequence[float] | None
    no_shuffle: bool | None
    eval_every: int | None
    eval_at: int | Sequence[int] | None
    patience: int | None
    metric: Metric | None
    eval_limit: int | None
    sample_prompts: Prompts | None
    sample_tokens: int | None
    no_initial_validation: bool | None
    lora: int | Sequence[int] | None
    lora_alpha: float | Sequence[float] | None
    lora_dropout: float | Sequence[float] | None
    lora_targets: str | Sequence[str] | None
    rslora: bool | None
    modules_to_save: str | Sequence[str] | None
    adapter: Path | None
    base: str | None
    merge: bool | None
    search: str | None
    sample: str | Sequence[str] | Mapping[str, Any] | None
    space: Path | None
    trials: int | None
    trials_file: Path | None
    eta: int | None
    first_rung: int | None
    workers: int | None
    interval: int | None
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None
    keep_best: int | None
    save_dtype: str | None
    part: str | None
    only: str | Sequence[str] | None
    spec: Path | None
    batch: int | Sequence[int] | None
    lr: float | Sequence[float] | None


class Generate(TypedDict, total=False):
    model: Path | None
    adapter: Path | Sequence[Path] | None
    base: str | None
    tokenizer: str | None
    dtype: str | None
    prompt: str | Sequence[str] | Mapping[str, Any] | None
    prompts: Path | None
    chat: bool | None
    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    samples: int | None
    seed: int | None
    stop: str | Sequence[str] | Mapping[str, Any] | None
    cache_memory: int | str | None
    devices: str | None
    device_memory: int | str | None
    host_memory: int | str | None
    disk_memory: int | str | None
    disk: Path | None
    concurrent: int | None
    strict: bool | None
    reserve_for_forks: bool | None
    pinned_memory: int | str | None
    precision: str | None
    optimizer_placement: str | None
    frozen_weights: str | None
    link: str | None
    no_prefetch: bool | None
    microbatch_group: int | None
    replicas: int | None
    no_cache: bool | None
    policy: str | None
    cuts: int | Sequence[int] | None
    plan: Path | None
    out: Path | None
