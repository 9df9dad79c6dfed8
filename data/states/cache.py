"""The verifier's states on disk, which training reads in place of running it.

A cache is a folder: `shard-00000.safetensors` has the tensor `states [tokens, (L+1)*H]`, features
and then last hidden state; `shard-00000.json` says whose states they are, and which rows are which
document, with a checksum of each; `manifest.json` says whether they are all there.

Legend: H verifier's hidden size, L feature layers.
"""

import hashlib
import json
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.data.states.featurize import Featurizer
from headstart.models.verifier.verifier import Verifier
from headstart.models.verifier.weights import save_tensors

OF = ("verifier", "fingerprint", "template", "layers", "hidden_size", "dtype")
"""What states are told by; the first, a name, decides nothing."""


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
    """A folder of states.

    Args:
        mend: put right what can be: a damaged shard is deleted, to be written again, and a manifest
            that is damaged or lost is made from the shards.

    Raises:
        ValueError: something in it is damaged, or of different verifiers.
    """

    def __init__(self, folder: str | Path, mend: bool = False):
        self.folder, self.mend = Path(folder), mend
        self.of: dict[str, Any] = {}
        """Whose states these are, and how they are stored; empty where there are none."""
        self.complete, self.expected = False, 0
        """Whether all are written, and how many documents that will be."""
        self.places: dict[str, tuple[Path, int, int, int]] = {}  # shard, start, length, checksum
        self._files: dict[Path, Any] = {}
        self._checked: set[str] = set()
        for index in sorted(self.folder.glob("shard-*.json")):
            self._read_index(index)
        if (self.folder / "manifest.json").exists():
            self._read_manifest(self.folder / "manifest.json")

    def _read_index(self, index: Path) -> None:
        shard = index.with_suffix(".safetensors")
        try:
            with self._readable(index):
                described = json.loads(index.read_text())
                of = {name: described["of"][name] for name in OF}
                size = int(described["bytes"])
                documents = [(str(name), *map(int, at)) for name, *at in described["documents"]]
                if any(len(document) != 4 for document in documents):
                    raise ValueError("documents without their places")
            found = shard.stat().st_size if shard.exists() else 0
            if found != size:
                raise self.broken(shard, f"it has {found} bytes of {size}")
        except ValueError as error:
            if not self.mend:
                raise
            self._drop(shard, error)
            return
        self._belong(of)
        self.places |= {name: (shard, *place) for name, *place in documents}

    def _read_manifest(self, path: Path) -> None:
        try:
            with self._readable(path):
                manifest = json.loads(path.read_text())
                of = {name: manifest["of"][name] for name in OF}
                self.expected, self.complete = int(manifest["documents"]), manifest["complete"]
        except ValueError as error:
            if not self.mend:
                raise
            warnings.warn(f"{error} (made anew)", stacklevel=2)
            return
        self._belong(of)

    def _belong(self, of: dict[str, Any]) -> None:
        """Raise a ValueError for states of another verifier than the first ones."""
        for name in OF[1:]:  # not by its name
            if self.of and self.of[name] != of[name]:
                raise ValueError(
                    f"cached features {str(self.folder)!r} hold states with {name} = "
                    f"{self.of[name]} and others with {of[name]}; write them anew, into another "
                    "folder"
                )
        self.of = of

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise self.broken(path, f"it cannot be read ({why})") from error

    def broken(self, path: Path, why: str) -> ValueError:
        return ValueError(
            f"cached features: {path} is damaged: {why}; run the same data/features.py again with "
            "--verify true, which writes what is damaged anew"
        )

    def _drop(self, shard: Path, why: object) -> None:
        """Delete a damaged shard."""
        warnings.warn(f"{why}; it is deleted", stacklevel=2)
        self.places = {name: place for name, place in self.places.items() if place[0] != shard}
        self._files.pop(shard, None)
        shard.with_suffix(".json").unlink(missing_ok=True)
        shard.unlink(missing_ok=True)

    def verify(self) -> None:
        """Read all states, and delete the shards of damaged ones."""
        for name in list(self.places):
            if name in self.places:  # its shard has not been deleted yet
                try:
                    self.read(name, ())
                except ValueError as error:
                    self._drop(self.places[name][0], error)

    def check_there(self) -> None:
        """Raise a ValueError where there is no cache."""
        if not self.of:
            raise ValueError(
                f"cached features {str(self.folder)!r}: no such cache; write it with "
                f"python data/features.py --out {self.folder} --verifier … --data …"
            )

    def check(self, verifier: Verifier, layers: tuple[int, ...]) -> None:
        """Raise a ValueError unless these are this verifier's states, of these layers at least."""
        self.check_there()
        for what, name, wanted in (
            ("verifier", "fingerprint", verifier.fingerprint()),
            ("chat template", "template", template_of(verifier)),
        ):
            if self.of[name] != wanted:
                raise ValueError(
                    f"cached features {str(self.folder)!r} are of another {what}: written for "
                    f"{self.of['verifier']} ({name} {self.of[name]}), this is {verifier.name} "
                    f"({name} {wanted}); "
                    "write others with data/features.py --out another folder"
                )
        missing = [layer for layer in layers if layer not in self.of["layers"]]
        if missing:
            raise ValueError(
                f"cached features {str(self.folder)!r} have the layers {self.of['layers']}, not "
                f"{missing}; write others with data/features.py --out another folder --layers "
                f"'{json.dumps(layers)}'"
            )

    def check_whole(self, documents: Sequence[list[int]]) -> None:
        """Raise a ValueError unless it is finished and has every one of these."""
        if not self.complete:
            there = f"{len(self.places)} of {self.expected} rows"
            if not self.expected:
                there = f"{len(self.places)} rows, and no manifest.json"
            raise ValueError(
                f"cached features {str(self.folder)!r} are half-written: {there}; run the same "
                "data/features.py again"
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
        width = self.of["hidden_size"]
        parts = dict(zip(self.of["layers"], states.split(width, dim=-1), strict=False))
        last = states[:, -width:]
        return [torch.cat([parts[layer] for layer in layers], dim=-1), last] if layers else [last]

    # ---- writing -----------------------------------------------------------------------------

    def begin(self, of: dict[str, Any], expected: int) -> None:
        """Write whose the states are; of a cache that is there, they must be the same.

        Args:
            expected: documents that it will have.
        """
        for name in OF[1:]:
            if self.of and self.of[name] != of[name]:
                raise ValueError(
                    f"out: {self.folder} holds states with {name} = {self.of[name]}, now it is "
                    f"{of[name]}; pass another --out"
                )
        self.of, self.expected = of, expected
        self.folder.mkdir(parents=True, exist_ok=True)
        self.finish(complete=False)

    def finish(self, complete: bool = True) -> None:
        """Write the manifest."""
        self.complete = complete
        manifest = {"of": self.of, "documents": self.expected, "complete": complete}
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
        save_tensors({"states": torch.cat([states for _, states in documents])}, partial, None)
        partial.replace(shard)
        described = {"of": self.of, "bytes": shard.stat().st_size, "documents": entries}
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
