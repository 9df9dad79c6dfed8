"""The verifier's states of all rows, on disk: for verifiers too large to stand beside the training.

    python data/features.py --verifier embedded/smollm2-135m --out outputs/features \\
        --data '[data/smollm2/train.jsonl, data/smollm2/eval.jsonl]' --max_length 512

Training reads them with --data.features outputs/features. A stopped run is continued by the same
command, which may also add data. What is written is read again by its document's token ids, and
only for the verifier and the chat template it was written with.

A cache is a folder: `shard-00000.safetensors` has the tensor `states [tokens, (L+1)*H]`, features
and then last hidden state; `shard-00000.json` says which rows of it are which document, with a
checksum of each; `manifest.json` says whose they are, and whether they are all there.

Legend: H verifier's hidden size, L feature layers.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from headstart.data import conversations
from headstart.data.featurize import Featurizer
from headstart.data.lock import only_writer
from headstart.data.packing import by_length
from headstart.data.render import render_all
from headstart.models.adapter import join
from headstart.models.eagle3 import check_layers
from headstart.models.outline import Outline
from headstart.models.partial import ends
from headstart.models.verifier import Verifier
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
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template; default: those recorded with the answers."""
    verifier_dtype: str = "float32"
    """float32 or bfloat16."""
    dtype: str | None = None
    """What is stored, float32 or bfloat16; default: the verifier's."""
    device: str = "cpu"
    """cpu, cuda, or auto: its layers on all GPUs of this machine."""
    batch_tokens: int | None = None
    """Tokens that the verifier runs over at once, 1: one row; default: 2048 on CPUs, else 16384."""


def key(ids: Tensor) -> str:
    """A document's name in the cache, by its ids: long [T]."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).hexdigest()


def template_of(verifier: Verifier) -> str:
    """16 hex digits of the chat template."""
    return hashlib.sha256(str(verifier.tokenizer.chat_template).encode()).hexdigest()[:16]


def checksum(states: Tensor) -> int:
    """Of `[T, (L+1)*H]`, as it lies on disk."""
    return zlib.crc32(states.contiguous().view(torch.uint8).numpy())


class Cache:
    """A folder of states."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = {}
        self.places: dict[str, tuple[Path, int, int, int]] = {}  # shard, start, length, checksum
        self._files: dict[Path, Any] = {}
        self._checked: set[str] = set()
        if (self.folder / "manifest.json").exists():
            self._read_manifest()

    def _read_manifest(self) -> None:
        path = self.folder / "manifest.json"
        try:
            self.manifest = json.loads(path.read_text())
            for index in sorted(self.folder.glob("shard-*.json")):
                path = index
                shard = index.with_suffix(".safetensors")
                described = json.loads(index.read_text())
                size = shard.stat().st_size if shard.exists() else 0
                if size != described["bytes"]:
                    raise self.broken(shard, f"it has {size} bytes of {described['bytes']}")
                for name, start, length, checked in described["documents"]:
                    self.places[name] = (shard, start, length, checked)
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise self.broken(path, f"it cannot be read ({error})") from error

    def broken(self, path: Path, why: str) -> ValueError:
        return ValueError(
            f"cached features: {path} is damaged: {why}; delete {path.with_suffix('')}.* and run "
            "data/features.py again, which writes what is missing"
        )

    def check_there(self) -> None:
        """Raise a ValueError where there is no cache."""
        if not self.manifest:
            raise ValueError(
                f"cached features {str(self.folder)!r}: no such cache; write it with "
                f"python data/features.py --out {self.folder} --verifier … --data …"
            )

    def check(self, verifier: Verifier, layers: tuple[int, ...]) -> None:
        """Raise a ValueError unless these are this verifier's states, of these layers at least."""
        self.check_there()
        for what, found, wanted in (
            ("verifier", self.manifest["fingerprint"], verifier.fingerprint()),
            ("verifier", self.manifest["ends"], ends(verifier)),  # all that a part of it shows
            ("chat template", self.manifest["template"], template_of(verifier)),
        ):
            if found != wanted:
                raise ValueError(
                    f"cached features {str(self.folder)!r} are of another {what}: written for "
                    f"{self.manifest['verifier']} ({found}), this is {verifier.name} ({wanted}); "
                    "write others with data/features.py --out another folder"
                )
        missing = [layer for layer in layers if layer not in self.manifest["layers"]]
        if missing:
            raise ValueError(
                f"cached features {str(self.folder)!r} have the layers {self.manifest['layers']}, "
                f"not {missing}; write others with data/features.py --layers {list(layers)}"
            )

    def check_whole(self, documents: Sequence[list[int]]) -> None:
        """Raise a ValueError unless it is finished and has every one of these."""
        if not self.manifest["complete"]:
            raise ValueError(
                f"cached features {str(self.folder)!r} are half-written: {len(self.places)} of "
                f"{self.manifest['documents']} rows; run the same data/features.py again"
            )
        missing = sum(key(torch.tensor(ids)) not in self.places for ids in documents)
        if missing:
            raise ValueError(
                f"cached features {str(self.folder)!r} lack {missing} of {len(documents)} rows: "
                "they were written with other data, max_length or chat_template_kwargs; run "
                f"data/features.py --out {self.folder} with those of the training, which adds them"
            )

    def read(self, name: str, layers: tuple[int, ...]) -> list[Tensor]:
        """Features [T, L*H], if any layers are asked for, and last hidden state [T, H].

        Raises:
            ValueError: the shard is damaged.
        """
        shard, start, length, checked = self.places[name]
        try:
            if shard not in self._files:
                self._files[shard] = safe_open(shard, framework="pt")  # mapped, not read
            states = self._files[shard].get_slice("states")[start : start + length]
        except (OSError, SafetensorError) as error:
            raise self.broken(shard, f"it cannot be read ({error})") from error
        if name not in self._checked and checksum(states) != checked:
            raise self.broken(shard, "a checksum is wrong")
        self._checked.add(name)
        width = self.manifest["hidden_size"]
        parts = dict(zip(self.manifest["layers"], states.split(width, dim=-1), strict=False))
        last = states[:, -width:]
        return [torch.cat([parts[layer] for layer in layers], dim=-1), last] if layers else [last]

    # ---- writing -----------------------------------------------------------------------------

    def begin(self, manifest: dict[str, Any]) -> None:
        """Write who the states are of; of a cache that is there, they must be the same."""
        for name in ("fingerprint", "template", "layers", "dtype"):
            if self.manifest and self.manifest[name] != manifest[name]:
                raise ValueError(
                    f"out: {self.folder} holds states with {name} = {self.manifest[name]}, now it "
                    f"is {manifest[name]}; pass another --out"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_manifest(manifest)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        replace_text(self.folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")

    def append(self, documents: list[tuple[str, Tensor]]) -> None:
        """Write a shard of documents' states, whole or not at all."""
        numbers = [int(p.stem.split("-")[1]) for p in self.folder.glob("shard-*.json")]
        shard = self.folder / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
        entries, start = [], 0
        for name, states in documents:
            entries.append((name, start, len(states), checksum(states)))
            start += len(states)
        partial = shard.with_name(f".{shard.name}.partial")
        save_file({"states": torch.cat([states for _, states in documents])}, partial)
        partial.replace(shard)
        described = {"bytes": shard.stat().st_size, "documents": entries}
        replace_text(shard.with_suffix(".json"), json.dumps(described))
        self.places |= {name: (shard, *rest) for name, *rest in entries}


def replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


class CachedFeaturizer(Featurizer):
    """A `Featurizer` that reads a document's states instead of running the verifier."""

    def __init__(
        self,
        folder: str,
        verifier: Verifier,
        layers: tuple[int, ...],
        documents: Sequence[list[int]],
    ):
        """`documents`: all that will come.

        Raises:
            ValueError: no such cache, one of another verifier, template or layers, or without all
                of them.
        """
        super().__init__(verifier, layers, dtype=verifier.dtype)
        self.cache = Cache(folder)
        self.cache.check(verifier, layers)
        self.cache.check_whole(documents)

    def find(self, documents: dict[bytes, Tensor], slots: int) -> dict[bytes, list[Tensor]]:
        return {
            ids: self.cache.read(key(document), self.layers) for ids, document in documents.items()
        }


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
    for source in settings.data:
        with named("data"):
            conversations.find(source)  # before minutes are spent on weights
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
        )
        print(f"{source}: {audit}")
        documents |= {key(ids): ids for ids in (torch.tensor(row.input_ids) for row in rows)}
    dtype = getattr(torch, settings.dtype or settings.verifier_dtype)
    cache = Cache(settings.out)
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
    manifest = {
        "verifier": verifier.name,
        "fingerprint": verifier.fingerprint(),
        "ends": ends(verifier),
        "template": template_of(verifier),
        "layers": list(layers),
        "hidden_size": verifier.hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "documents": known,
        "complete": False,
    }
    try:
        cache.begin(manifest)
        at_once = settings.batch_tokens or _AT_ONCE.get(verifier.device.type, 16384)
        groups = by_length([len(ids) for ids in missing.values()], at_once)
        write(cache, Featurizer(verifier, layers, dtype=dtype), missing, groups, of_token)
        cache.write_manifest(manifest | {"complete": True})
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
