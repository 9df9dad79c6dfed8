"""What a run is: everything that its recipe says, and what its script adds. Plain objects."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from headstart.data.conversations import bad
from headstart.data.conversations.mixture import check_weights
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.joint.lora import JointModel
from headstart.models.joint.mtp import JointMTP
from headstart.models.losses import LossConfig
from headstart.models.proposal.trees import MOST_NODES
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import named

RUN_LENGTH = ("max_steps", "num_epochs", "max_tokens")


@dataclass
class DataConfig:
    """What is trained on, and what validation replays."""

    train: str | dict[str, float]
    """JSON, CSV or Parquet, folder or Hub data set: conversations that the verifier answered.
    Several are mixed by weight: {SOURCE: WEIGHT, …}."""
    eval: str | None = None
    """The same, greedy answers to other prompts; default: no validation."""
    max_length: int = 2048
    """Longer rows are cut, in tokens."""
    batch_tokens: int = 4096
    """Slots of a micro-batch, padding included."""
    packed: bool = True
    """Several documents in a row of max_length slots; else one, padded."""
    min_tokens: int = 0
    """Training rows with fewer tokens are left out."""
    longer: Literal["cut", "drop"] = "cut"
    """Training rows over max_length: cut there, or left out."""
    streaming: bool = False
    """Read the training data while training, window by window: for more than memory holds."""
    max_bad_rows: float = bad.MAX_BAD_ROWS
    """Fraction of unusable rows, which are left out, that ends the run; after 1000 rows."""
    limit: int | None = None
    """Train on the first so many conversations."""
    eval_limit: int | None = None
    """Replay so many conversations, evenly spread over the file."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template; default: those recorded with the answers."""
    keep_states: bool = True
    """Keep the verifier's states in memory over epochs, where they fit; not when streaming."""
    features: str | None = None
    """Folder of states that data/features.py wrote; default: the verifier computes them."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_length", 2), ("batch_tokens", 1), ("limit", 1), ("eval_limit", 1),
            ("min_tokens", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name} is {value}; it must be {least} or more")
        bad.check_limit(self.max_bad_rows, "data.max_bad_rows")
        if self.features is not None and self.streaming:
            raise ValueError(
                f"data.features is {self.features!r}, but what is streamed has no states on disk; "
                "pass --data.streaming false, or --data.features null"
            )
        with named("data.train"):
            check_weights(self.weights)

    @property
    def weights(self) -> dict[str, float]:
        """Of each source that is trained on."""
        return {self.train: 1.0} if isinstance(self.train, str) else self.train


@dataclass
class TrackingConfig:
    """What is logged, and where besides `metrics.jsonl`."""

    log_every: int = 10
    """Optimizer steps between log lines; each line is the mean over them."""
    wandb: str | None = None
    """Project on wandb; default: no wandb."""
    wandb_offline: bool = False
    """Keep wandb's files in output_dir for a later `wandb sync`."""


@dataclass
class TrainingConfig:
    """How long, how fast, where to."""

    output_dir: str
    """Folder of the run: checkpoints, metrics, provenance."""
    max_steps: int | None = None
    """Optimizer steps to train. Give exactly one of max_steps, num_epochs, max_tokens."""
    num_epochs: float | None = None
    """Passes over the training rows."""
    max_tokens: int | None = None
    """Budget of input tokens, each counted every time it is trained on."""
    accumulation: int = 1
    """Micro-batches of one rank in an optimizer step."""
    learning_rate: float = 1e-4
    """Peak of AdamW's rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the rate after warm-up."""
    warmup: float = 0.03
    """Share of the run in which the rate rises linearly."""
    floor: float = 0.1
    """Where the cosine ends, as a share of learning_rate."""
    weight_decay: float = 0.0
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """auto: bf16 on CUDA and on CPUs with AMX, else no. Master weights are float32 always."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    validate_every: int = 100
    """Optimizer steps between validations; 0: only at the end."""
    draft_length: int = 4
    """K of the replayed acceptance length, which also chooses the best checkpoint."""
    save_every: int = 500
    """Optimizer steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Checkpoints kept, besides the best one."""
    resume: bool = False
    """Continue from the newest intact checkpoint of output_dir."""


def check(settings: TrainingConfig) -> None:
    """Raise a ValueError for settings that cannot be trained with."""
    given = [name for name in RUN_LENGTH if getattr(settings, name) is not None]
    if len(given) != 1:
        unset = " or ".join(f"--training.{name} null" for name in given)
        raise ValueError(
            "training: give exactly one of max_steps, num_epochs and max_tokens, not "
            f"{' and '.join(given) or 'none'}; "
            + (f"unset the other with {unset}" if given else "such as --training.num_epochs 1")
        )
    for name in (given[0], "accumulation", "draft_length", "keep_last", "max_grad_norm"):
        if getattr(settings, name) <= 0:
            raise ValueError(
                f"training.{name} is {getattr(settings, name)}; it must be greater than 0"
            )
    if settings.draft_length > MOST_NODES:
        raise ValueError(
            f"training.draft_length is {settings.draft_length}; it must be {MOST_NODES} or less"
        )
    if not 0 <= settings.seed < 2**32:  # what NumPy's generator takes
        raise ValueError(f"training.seed is {settings.seed}; it must be in [0, 2^32)")
    for name in ("learning_rate", "weight_decay", "validate_every", "save_every"):
        if getattr(settings, name) < 0:
            raise ValueError(
                f"training.{name} is {getattr(settings, name)}; it must not be below 0"
            )
    for name in ("warmup", "floor"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"training.{name} is {getattr(settings, name)}; it must be in 0 … 1")
    folder = Path(settings.output_dir).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "cannot be written to" if folder.is_dir() else "is not a folder"
        raise ValueError(
            f"training.output_dir {settings.output_dir!r}: {folder} {what}; "
            "pass another --training.output_dir"
        )


Featurize = Callable[[Batch], Batch]


@dataclass
class CommonRecipe:
    """What decides a run; each script adds `drafter`, its own drafter's config."""

    data: DataConfig
    training: TrainingConfig
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name of the model drafted for."""
    adapter: str | None = None
    """LoRA adapter of the verifier, which it is answered with: a folder or a Hub name."""
    verifier_dtype: str = "auto"
    """float32 or bfloat16; auto: bfloat16 where training's mixed precision is bf16."""
    loss: LossConfig = field(default_factory=LossConfig)
    init_from: str | None = None
    """Folder of a trained drafter to start from, headstart's or another program's; its shape
    replaces `drafter`. Ids that the data needs enter its draft vocabulary."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    plan: str | None = None
    """Print the memory and disk that a run would need, from the verifier's config alone, and stop:
    ddp:1, ddp:8, zero2:8, zero3:8 or fsdp2:8, launcher and processes."""


@dataclass
class Script:
    """What one training script adds to the run that all of them share."""

    kind: str
    """Type of drafter that it trains, as checkpoints name it."""
    create: Callable[[Verifier, Tensor], TrainableDrafter]
    """Makes a new one, for a verifier and how often each of its ids is supervised, [V]."""
    check: Callable[[Outline], None] | None = None
    """Raises a ValueError for a new one's settings that this verifier does not allow."""
    max_depth: int | None = None
    """Most drafts in a row that a new one makes; None: any."""
    rewrite: Callable[[Any, Featurize], Featurize] | None = None
    """Of a drafter and what adds the verifier's states, something that does so to texts that it has
    changed first. Training's batches go through it, validation's do not."""
    joint: Callable[[Any, Path | None], JointModel | JointMTP] | None = None
    """Of a drafter, and the folder of the checkpoint that it comes from, what is trained where its
    verifier is trained too; None: the verifier stays as it is."""
