"""The verifier's states of all rows, on disk: for verifiers too large to stand beside the training.

    python data/features.py --verifier embedded/smollm2-135m --out outputs/features \\
        --data '[data/smollm2/train.jsonl, data/smollm2/eval.jsonl]' --max_length 512

Training reads them with --data.features outputs/features. A stopped run is continued by the same
command, which may also add data. What is written is read again by its document's token ids, and
only for the verifier and the chat template it was written with (see data/states/cache.py).
"""

import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from headstart.data.conversations import bad, reading
from headstart.data.rows.packing import by_length
from headstart.data.rows.rendering import render_all
from headstart.data.rows.row import check_ids
from headstart.data.states.cache import Cache, key, template_of
from headstart.data.states.featurize import Featurizer
from headstart.lock import only_writer
from headstart.models.drafters.eagle3 import check_layers
from headstart.models.verifier.adapter import join
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.verifier import Verifier
from headstart.script import named, run_script

SHARD_BYTES = 1 << 30
_AT_ONCE = {"cpu": 2048}  # slots that the verifier runs over, on such a device


@dataclass
class Features:
    """Settings of a run."""

    out: str
    """Folder to write (or to continue)."""
    data: list[str] = field(default_factory=list)
    """What will be trained on and validated with: JSONL files, folders or Hub data sets."""
    verifier: str = "embedded/smollm2-135m"
    """Embedded name, local folder or Hub name."""
    adapter: str | None = None
    """LoRA adapter of the verifier, a folder or a Hub name."""
    layers: list[int] | None = None
    """Residual streams to store, after layer l = 1 … n; default: EAGLE-3's; [] for heads, EAGLE-1
    and drafts by a language model, [n] for MTP."""
    max_length: int = 2048
    """Rows are cut at so many tokens: data.max_length of the training."""
    limit: int | None = None
    """Only the first so many conversations of each."""
    max_bad_rows: float = bad.MAX_BAD_ROWS
    """Fraction of unusable rows, which are left out, that ends the run; after 1000 rows."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template; default: those recorded with the answers."""
    verifier_dtype: str = "float32"
    """float32 or bfloat16."""
    dtype: str | None = None
    """What is stored, float32 or bfloat16; default: the verifier's."""
    verify: bool = False
    """Read all that is there against its checksums, and write anew what is damaged."""
    device: str = "cpu"
    """cpu, cuda, or auto: its layers on all GPUs of this machine."""
    batch_tokens: int | None = None
    """Tokens that the verifier runs over at once, 1: one row; default: 2048 on CPUs, else 16384."""


def check_room(folder: Path, size: int) -> None:
    """Raise a ValueError where `size` bytes do not fit on the disk of `folder`."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if size > free:
        raise ValueError(
            f"out: {folder} needs {size / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free; name "
            "a larger disk, a smaller --limit, fewer --layers, or --dtype bfloat16"
        )


def run(settings: Features) -> None:
    """Write what is not there yet."""
    if not settings.data:
        raise ValueError("data: name what will be trained on, such as --data '[train.jsonl]'")
    if settings.dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype {settings.dtype!r} is not supported; use float32 or bfloat16")
    for name in ("max_length", "limit", "batch_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    bad.check_limit(settings.max_bad_rows, "max_bad_rows")
    if Path(settings.out).is_file():
        raise ValueError(f"out {settings.out!r} is a file; pass a folder")
    for source in settings.data:
        with named("data"):
            reading.find(source)  # before minutes are spent on weights
    num_layers = Outline.read(settings.verifier).num_layers
    layers: tuple[int, ...] = ()
    if settings.layers != []:
        wanted = None if settings.layers is None else tuple(settings.layers)
        layers = check_layers(wanted, num_layers, "layers")
    with only_writer(Path(settings.out) / ".writing.lock", f"out {settings.out!r}"):
        store(settings, layers)


def store(settings: Features, layers: tuple[int, ...]) -> None:
    """Load the verifier and write what is not there yet of these residual streams."""
    verifier = Verifier.load(
        join(settings.verifier, settings.adapter), settings.verifier_dtype, settings.device
    )
    documents: dict[str, Tensor] = {}
    for source in settings.data:
        rows, audit = render_all(
            source,
            verifier.tokenizer,
            verifier.terminator_ids,
            settings.max_length,
            settings.chat_template_kwargs,
            settings.limit,
            max_bad_rows=settings.max_bad_rows,
        )
        for row in rows:
            check_ids(f"row {row.id!r}", row.input_ids, verifier.num_embeddings)
        print(f"{source}: {audit}")
        documents |= {key(ids): ids for ids in (torch.tensor(row.input_ids) for row in rows)}
    dtype = getattr(torch, settings.dtype or settings.verifier_dtype)
    cache = Cache(settings.out, mend=True)
    before = max(cache.expected, len(cache.places))
    if settings.verify:
        cache.verify()
    missing = {name: ids for name, ids in documents.items() if name not in cache.places}
    width = (len(layers) + 1) * verifier.hidden_size
    of_token = width * dtype.itemsize
    size = sum(map(len, missing.values())) * of_token
    print(
        f"{len(documents)} rows, {sum(map(len, documents.values()))} tokens of {of_token} bytes; "
        f"{len(missing)} rows are to be written: {size / 1e9:.3f} GB"
    )
    check_room(cache.folder, size)
    known = len(set(cache.places) | set(documents))
    if known < before:
        warnings.warn(
            f"{before - known} rows of other data are damaged or were never written; to have them, "
            "name that --data too",
            stacklevel=2,
        )
    of = {
        "verifier": verifier.name,
        "fingerprint": verifier.fingerprint(),
        "template": template_of(verifier),
        "layers": list(layers),
        "hidden_size": verifier.hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        cache.begin(of, known)
        at_once = settings.batch_tokens or _AT_ONCE.get(verifier.device.type, 16384)
        groups = by_length([len(ids) for ids in missing.values()], at_once)
        write(cache, Featurizer(verifier, layers, dtype=dtype), missing, groups, of_token)
        cache.finish()
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"out: {settings.out} cannot be written: {error}; what is there stays, the same "
            "command goes on"
        ) from error
    print(f"{cache.folder}: {known} rows")


def write(
    cache: Cache,
    featurizer: Featurizer,
    documents: dict[str, Tensor],
    groups: list[list[int]],
    of_token: int,
) -> None:
    """Run the verifier over groups of `documents`, store its states, `of_token` bytes a token."""
    names = list(documents)
    lengths = [len(documents[name]) for name in names]
    pending: list[tuple[str, Tensor]] = []
    held = 0  # bytes
    with torch.no_grad(), tqdm(total=sum(lengths), unit="token", disable=None) as bar:
        for group in groups:
            run = featurizer.run([documents[names[i]] for i in group], [list(range(len(group)))])
            for i, states in zip(group, run, strict=True):
                pending.append((names[i], torch.cat(states, dim=-1).to(featurizer.dtype).cpu()))
                held += lengths[i] * of_token
                bar.update(lengths[i])
            if held >= SHARD_BYTES:
                cache.append(pending)
                pending, held = [], 0
    if pending:
        cache.append(pending)


if __name__ == "__main__":
    run_script(Features, run)
