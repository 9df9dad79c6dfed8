"""The one training loop: any `TrainableDrafter`, under any launcher of Accelerate.

One optimizer step takes in `accumulation` micro-batches on each rank. The loss is a mean over the
supervised slots of the whole optimizer step, so all of them are fetched and counted first; each
micro-batch then gets weights that have the count in them, and gradients are simply summed.
"""

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import Tensor

from headstart.models.batch import Batch, supervised
from headstart.models.drafter import TrainableDrafter
from headstart.train.run import sharding
from headstart.train.run.checkpoint import Checkpoints, Saved, random_state, restore_random
from headstart.train.run.settings import TrainingConfig, check
from headstart.train.run.tracking import Tracker


class Loader(Protocol):
    """What the loop asks of a loader: each `iter` is the rest of one epoch of this rank."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def launch(settings: TrainingConfig) -> Accelerator:
    """The `Accelerator` of this process, and every random generator seeded."""
    check(settings)
    precision = settings.mixed_precision
    cuda = torch.cuda.is_available()
    if precision == "auto":
        precision = "bf16" if cuda or torch.cpu._is_amx_tile_supported() else "no"
    deepspeed, fsdp = (
        os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"
        for name in ("DEEPSPEED", "FSDP")
    )
    if deepspeed and not cuda:
        sharding.compile_nothing()
    if fsdp and not cuda:
        sharding.share_on_cpus()
    # On CPUs, Accelerate 1.15 starts data parallelism only with cpu=True, and counts one process
    # under DeepSpeed unless told the backend instead.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if deepspeed and not cuda else []
    cpu = not (cuda or deepspeed or fsdp)
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=handlers)
    sharding.configure(accelerator, settings.max_grad_norm)
    set_seed(settings.seed)
    return accelerator


def rate(settings: TrainingConfig, fraction: float) -> float:
    """Learning rate of an optimizer step that ends at `fraction` (0 … 1) of the run."""
    if fraction < settings.warmup:
        return settings.learning_rate * fraction / settings.warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    after = (min(fraction, 1.0) - settings.warmup) / max(1e-12, 1 - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * after))
    return settings.learning_rate * (settings.floor + (1 - settings.floor) * cosine)


def epochs_of_step(loader: Loader, settings: TrainingConfig) -> float:
    """Passes over the data that an optimizer step takes in; 0 of a stream, whose length is unknown.

    Raises:
        ValueError: a stream, of which passes are asked for.
    """
    try:
        return settings.accumulation / len(loader)
    except ValueError:
        if settings.num_epochs is not None:
            raise
        return 0.0


def count(batches: list[Batch], steps: range) -> Tensor:
    """Supervised slots of each step over some batches, then their tokens: long [S + 1]."""
    counts = torch.zeros(len(steps) + 1, dtype=torch.long)
    for batch in batches:
        for number, step in enumerate(steps):
            counts[number] += supervised(batch, step).sum().cpu()
        counts[-1] += (batch["document_ids"] >= 0).sum().cpu()
    return counts


class Averages:
    """(sum, count) pairs added up over micro-batches and steps, divided once at the log line."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sums: dict[str, Tensor] = {}  # name -> [2], double

    def add(self, metrics: dict[str, tuple[Any, Any]]) -> None:
        for name, pair in metrics.items():
            pair = [torch.as_tensor(x, dtype=torch.double, device=self.device) for x in pair]
            self.sums[name] = self.sums.get(name, 0) + torch.stack(pair)

    def means(self) -> dict[str, float]:
        """Over all ranks and everything added since the last call."""
        names = sorted(self.sums)
        table = torch.stack([self.sums[name] for name in names])
        sums, counts = sharding.total(table).cpu().unbind(1)
        self.sums = {}
        means = zip(names, (sums / counts).tolist(), counts.tolist(), strict=True)
        return {name: mean for name, mean, number in means if number > 0}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: pair.cpu() for name, pair in self.sums.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.sums = {name: pair.to(self.device) for name, pair in state.items()}


class StopSignal:
    """Turns SIGTERM, a scheduler's way to end a job, into a flag that the loop looks at."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "StopSignal":
        self.previous = signal.signal(signal.SIGTERM, self.receive)
        return self

    def receive(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self.previous)


def fit(
    drafter: TrainableDrafter,
    loader: Loader,
    featurize: Callable[[Batch], Batch],
    settings: TrainingConfig,
    accelerator: Accelerator,
    tracker: Tracker,
    checkpoints: Checkpoints,
    validate: Callable[[], dict[str, Any]] | None = None,
    resumed: Saved | None = None,
) -> dict[str, Any]:
    """Train `drafter` to the end of its budget, or until SIGTERM.

    Args:
        loader: batches of this rank, without the verifier's states.
        featurize: adds the verifier's states.
        validate: replayed acceptance, keyed as the reports are (`acceptance_length`, …).
        resumed: checkpoint to continue from; `drafter` has been loaded from it already.

    Returns:
        `step`, `tokens`, `stopped` (by SIGTERM), and `validation`, the last one's result or None.

    Raises:
        ValueError: the loss or its gradient is not finite, or a checkpoint cannot be written.
    """
    check(settings)
    world, device, steps = accelerator.num_processes, accelerator.device, drafter.loss_steps()
    trained = sharding.Trained(
        accelerator,
        drafter,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    model, optimizer = trained.model, trained.optimizer
    set_seed(settings.seed + accelerator.process_index)  # noise differs between ranks
    step, tokens, epochs, done, stopped, validation = 0, 0, 0.0, False, False, None
    step_epochs = epochs_of_step(loader, settings)
    averages = Averages(device)
    if resumed is not None:
        step, tokens, epochs, validation = (
            resumed.state[k] for k in ("step", "tokens", "epochs", "validation")
        )
        own = resumed.of_rank(accelerator.process_index, world)
        trained.load_optimizer_state(resumed.optimizer)
        loader.load_state_dict(own["loader"])
        averages.load_state_dict(own["averages"])
        if own["random"] is not None:
            restore_random(own["random"])
        if accelerator.is_main_process:
            checkpoints.point_best(resumed.folder, resumed.state)  # if killed before
        if len(resumed.ranks) != world:
            tracker.say(
                f"{len(resumed.ranks)} processes began this run, {world} go on: each row still "
                "comes once an epoch, in the same order; a step takes in "
                f"{world * settings.accumulation} micro-batches (--training.accumulation)"
            )
    total_steps = settings.max_steps
    if settings.num_epochs is not None:  # what remains, to the next whole step
        total_steps = step + math.ceil((settings.num_epochs - epochs) / step_epochs - 1e-6)
    if resumed is not None:
        ended = tokens >= settings.max_tokens if total_steps is None else step >= total_steps
        if ended:
            tracker.say(f"step {step}: the run is complete, nothing to resume")
            return {"step": step, "tokens": tokens, "stopped": False, "validation": validation}

    def save() -> None:
        ranks = sharding.collect(
            [
                {
                    "loader": loader.state_dict(),
                    "averages": averages.state_dict(),
                    "random": random_state(),
                }
            ]
        )
        trained.gather()
        moments = trained.optimizer_state()
        if accelerator.is_main_process:
            state = {"step": step, "tokens": tokens, "epochs": epochs, "validation": validation}
            checkpoints.save(drafter, state, ranks, moments)
        sharding.collect([])  # nobody goes on before it is written

    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    tracker.start(step, tokens)
    seconds, counted = 0.0, 0  # of training alone, since the last log line
    with closing(tracker), StopSignal() as stop:
        while not (done or stopped):
            started = time.perf_counter()
            group = list(itertools.islice(batches, settings.accumulation))
            flags = torch.tensor([stop.received])
            counts = torch.cat([count(group, steps), flags.long()])
            counts = sharding.total(counts.to(device)).cpu()
            stopped = counts[-1].item() > 0  # some rank was told to stop: all end with this step
            step, tokens = step + 1, tokens + counts[-2].item()
            epochs += step_epochs
            fraction = tokens / settings.max_tokens if settings.max_tokens else step / total_steps
            if settings.num_epochs:
                fraction = 1.0 if step == total_steps else epochs / settings.num_epochs
            for parameters, scale in zip(optimizer.param_groups, trained.scales, strict=True):
                parameters["lr"] = scale * rate(settings, fraction)

            # Gradients are summed over micro-batches and averaged over ranks.
            slots = counts[: len(steps)]
            share = drafter.loss_weights(min(fraction, 1.0)).double()
            weights = torch.where(slots > 0, share * world / slots.clamp(min=1), 0.0)
            weights = weights.to(device, torch.float32)
            value = torch.zeros((), device=device)
            for number, batch in enumerate(group, start=1):
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                with sharding.autocast(accelerator):
                    batch = featurize(batch)
                with trained.micro_batch(last=number == len(group)):
                    loss = model(batch, weights)
                    accelerator.backward(loss.value)
                value += loss.value.detach()
                real = batch["document_ids"] >= 0
                averages.add({**loss.metrics, "packing": (real.sum(), real.numel())})
            norm = trained.clip(settings.max_grad_norm)
            if not (math.isfinite(value) and math.isfinite(norm)):
                raise ValueError(
                    f"step {step}: the loss is {value.item():g} and its gradient's norm "
                    f"{norm:g}; {checkpoints.intact()}. Lower training.learning_rate "
                    f"({settings.learning_rate:g}) or set training.mixed_precision to no"
                )
            optimizer.step()
            optimizer.zero_grad()
            known = float(slots.sum() > 0) / world
            averages.add({"loss": (value * known, known), "grad_norm": (norm / world, 1 / world)})
            seconds, counted = seconds + time.perf_counter() - started, counted + counts[-2].item()

            done = fraction >= 1
            tracker.advance(step, fraction)
            if done or step % tracker.settings.log_every == 0:
                numbers = averages.means()
                numbers |= {"lr": rate(settings, fraction), "tokens_per_second": counted / seconds}
                tracker.log(step, tokens, numbers)
                seconds, counted = 0.0, 0
            due = settings.validate_every and step % settings.validate_every == 0
            better = False
            if validate is not None and (due or done):
                with trained.evaluating(), torch.no_grad(), sharding.autocast(accelerator):
                    validation = {"step": step, **validate()}
                tracker.validated(step, tokens, validation)
                judged = sharding.collect([checkpoints.is_better(validation)])
                better = judged[0]  # the main process's
            regular = settings.save_every and step % settings.save_every == 0
            if done or stopped or better or regular:
                save()
    if stopped:
        tracker.say(f"stopped by SIGTERM after step {step}; to go on: --training.resume true")
    return {"step": step, "tokens": tokens, "stopped": stopped, "validation": validation}
