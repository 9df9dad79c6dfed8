"""States on disk: training cannot tell, a killed writer goes on, wrong caches are named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from runs import recipe, run, verifier  # noqa: F401
from tiny_run import lines

from headstart.data import features
from headstart.data.features import Features
from headstart.data.states.cache import Cache, CachedFeaturizer, key
from headstart.data.states.featurize import Featurizer
from headstart.models.verifier.verifier import Verifier
from headstart.train.run.settings import CommonRecipe


def write(settings: CommonRecipe, out: Path, **changes: Any) -> str:
    data = settings.data
    wanted = {
        "data": [data.train, data.eval],
        "verifier": settings.verifier,
        "max_length": data.max_length,
        "batch_tokens": 1,  # states of a row alone, to the bit
    }
    features.run(Features(str(out), **wanted | changes))
    return str(out)


def documents_of(source: str, seed: int = 0) -> list[torch.Tensor]:
    """The ids of a data set's rows, as the tiny verifier's template gives them."""
    made = tiny.verifier(seed=seed)
    rows, _ = features.render_all(source, made.tokenizer, made.terminator_ids, 64)
    return [torch.tensor(row.input_ids) for row in rows]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "eagle1"])
def test_training_from_the_cache_is_training_online(
    tmp_path: Path,
    verifier: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = recipe(tmp_path, verifier, kind)
    settings.data.keep_states = False
    run(settings)
    online = lines(tmp_path / "run")
    layers = None if kind == "eagle3" else []
    settings.data.features = write(settings, tmp_path / "features", layers=layers)
    settings.training.output_dir = str(tmp_path / "cached")
    monkeypatch.setattr(Featurizer, "run", None)  # the verifier has no part in it
    monkeypatch.setattr(Verifier, "load", None)
    run(settings)
    cached = lines(tmp_path / "cached")
    for line in online + cached:
        del line["tokens_per_second"]
    assert cached == online
    validations = [lines(tmp_path / name, "validation") for name in ("run", "cached")]
    assert validations[0] == validations[1]


def test_bfloat16_takes_half_and_is_read_in_the_verifiers_precision(
    tmp_path: Path, verifier: str
) -> None:  # fmt: skip
    settings = recipe(tmp_path, verifier)
    for dtype in ("float32", "bfloat16"):
        write(settings, tmp_path / dtype, dtype=dtype)
    sizes = [
        sum(shard.stat().st_size for shard in (tmp_path / dtype).glob("*.safetensors"))
        for dtype in ("float32", "bfloat16")
    ]
    assert 1.9 < sizes[0] / sizes[1] < 2
    made, layers = tiny.verifier(), (2, 4, 5)
    documents = documents_of(settings.data.train)
    whole, half = (
        CachedFeaturizer(str(tmp_path / d), made, layers, []) for d in ("float32", "bfloat16")
    )
    for ids in documents:
        batch = {"input_ids": ids[None], "document_ids": torch.zeros(1, len(ids), dtype=torch.long)}
        one, other = whole(batch), half(batch)
        for name in ("features", "last_hidden"):
            assert other[name].dtype == torch.float32
            assert torch.equal(one[name].bfloat16().float(), other[name])


def test_fewer_layers_are_read_from_a_cache_of_more(
    tmp_path: Path, verifier: str
) -> None:  # fmt: skip
    settings = recipe(tmp_path, verifier)
    cache = Cache(write(settings, tmp_path / "features", layers=[2, 4, 5]))
    made = tiny.verifier()
    ids = documents_of(settings.data.train)[0]
    states = made.states(ids[None], (2, 5))
    features_of, last = cache.read(key(ids), (2, 5))
    assert torch.equal(features_of, states.features[0])
    assert torch.equal(last, states.last_hidden[0])
    with pytest.raises(ValueError, match=r"have the layers \[2, 4, 5\], not \[3\]; .*--layers"):
        cache.check(made, (2, 3))


def test_stopped_writer_goes_on_where_it_was(
    tmp_path: Path,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    settings = recipe(tmp_path, verifier)
    monkeypatch.setattr(features, "SHARD_BYTES", 30_000)
    whole = Cache(write(settings, tmp_path / "whole"))
    shards = len(list((tmp_path / "whole").glob("*.safetensors")))
    assert shards > 2
    append, written = Cache.append, []

    def killed(self: Cache, documents: list) -> None:
        if len(written) == 2:
            (self.folder / ".shard-00002.safetensors.partial").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(len(documents))
        append(self, documents)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Cache, "append", killed)
        write(settings, tmp_path / "broken")
    broken = Cache(tmp_path / "broken")
    assert len(broken.places) == sum(written)
    settings.data.features = str(tmp_path / "broken")
    with pytest.raises(ValueError, match=rf"half-written: {sum(written)} of 17 rows; run the same"):
        run(settings)
    capsys.readouterr()
    write(settings, tmp_path / "broken")
    assert f"{17 - sum(written)} rows are to be written" in capsys.readouterr().out
    resumed = Cache(tmp_path / "broken")
    assert set(resumed.places) == set(whole.places)
    for name in whole.places:
        for one, other in zip(whole.read(name, (2,)), resumed.read(name, (2,)), strict=True):
            assert torch.equal(one, other)
    assert len(list((tmp_path / "broken").glob("*.safetensors"))) <= shards + 1


def test_data_may_be_added(tmp_path: Path, verifier: str) -> None:
    settings = recipe(tmp_path, verifier)
    out = tmp_path / "features"
    settings.data.features = write(settings, out, data=[settings.data.train])
    with pytest.raises(ValueError, match=r"lack 3 of 15 rows: .*max_length or chat_template"):
        run(settings)
    before = {p: p.stat().st_mtime_ns for p in out.glob("shard-*")}
    write(settings, out)
    assert all(p.stat().st_mtime_ns == time for p, time in before.items())
    run(settings)


@pytest.fixture
def cached(tmp_path: Path, verifier: str) -> CommonRecipe:
    """A recipe that trains from a cache."""
    settings = recipe(tmp_path, verifier)
    settings.data.features = write(settings, tmp_path / "features")
    return settings


@pytest.mark.parametrize("harm", ["flipped", "cut", "missing"])
def test_damaged_shard_is_named_and_can_be_written_again(cached: CommonRecipe, harm: str) -> None:
    shard = Path(cached.data.features) / "shard-00000.safetensors"
    whole = shard.read_bytes()
    content = bytearray(whole)
    content[len(content) // 4] ^= 1
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content if harm == "flipped" else content[:-100])
    why = "a checksum is wrong" if harm == "flipped" else r"it has \d+ bytes of \d+"
    with pytest.raises(ValueError, match=rf"shard-00000\.safetensors is damaged: {why}; run the"):
        run(cached)
    with pytest.warns(UserWarning, match=rf"is damaged: {why}; .*; it is deleted"):
        write(cached, shard.parent, verify=True)
    assert shard.read_bytes() == whole
    cached.training.output_dir += "-again"
    run(cached)


def test_verifying_leaves_what_is_sound(cached: CommonRecipe) -> None:
    files = {p: p.stat().st_mtime_ns for p in Path(cached.data.features).glob("shard-*")}
    write(cached, Path(cached.data.features), verify=True)
    assert all(p.stat().st_mtime_ns == time for p, time in files.items())


def test_rows_of_other_data_in_a_damaged_shard_are_missed(cached: CommonRecipe) -> None:
    folder = Path(cached.data.features)
    (folder / "shard-00000.safetensors").unlink()
    with pytest.warns(UserWarning) as caught:
        write(cached, folder, data=[cached.data.train])
    assert any("5 rows of other data are damaged" in str(w.message) for w in caught)


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.json"])
@pytest.mark.parametrize("content", ["[1", "[1]", '{"of": 3}', '{"layers": 3}', "\xff"])
def test_damaged_index_is_named_and_made_anew(
    cached: CommonRecipe, name: str, content: str
) -> None:
    path = Path(cached.data.features) / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is damaged: it cannot be read"):
        run(cached)
    with pytest.warns(UserWarning, match="is damaged"):
        write(cached, path.parent)
    cached.training.output_dir += "-again"
    run(cached)


def test_lost_manifest_is_made_from_the_shards(cached: CommonRecipe, tmp_path: Path) -> None:
    folder = Path(cached.data.features)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"half-written: 17 rows, and no manifest\.json; run the"):
        run(cached)
    other = tiny.save(tiny.verifier(seed=1), tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds states with fingerprint = .*pass another --out"):
        write(cached, folder, verifier=other)
    before = {p: p.stat().st_mtime_ns for p in folder.glob("shard-*")}
    write(cached, folder)
    assert {p: p.stat().st_mtime_ns for p in folder.glob("shard-*")} == before
    run(cached)


def test_shards_of_two_verifiers_are_not_mixed(cached: CommonRecipe, tmp_path: Path) -> None:
    folder = Path(cached.data.features)
    other = tiny.save(tiny.verifier(seed=1), tmp_path / "other")
    write(cached, tmp_path / "theirs", verifier=other)
    for end in ("json", "safetensors"):
        (tmp_path / "theirs" / f"shard-00000.{end}").rename(folder / f"shard-00001.{end}")
    for read in (run, lambda settings: write(settings, folder)):
        with pytest.raises(ValueError, match=r"hold states with fingerprint = .* and others with"):
            read(cached)


def test_cache_of_another_verifier_is_refused(cached: CommonRecipe, tmp_path: Path) -> None:
    cached.verifier = tiny.save(tiny.verifier(seed=1), tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"cached features .* are of another verifier: written for"
    ):
        run(cached)
    with pytest.raises(ValueError, match=r"holds states with fingerprint = .*pass another --out"):
        write(cached, Path(cached.data.features))


def test_cache_of_a_finetuned_copy_is_refused(cached: CommonRecipe, tmp_path: Path) -> None:
    copy = tiny.verifier()
    copy.layers[3].mlp.up_proj.weight.data[0, 0] += 1.0  # a layer that training does not read
    cached.verifier = tiny.save(copy, tmp_path / "tuned")
    with pytest.raises(
        ValueError, match=r"cached features .* are of another verifier: written for"
    ):
        run(cached)


def test_cache_of_another_template_is_refused(cached: CommonRecipe, tmp_path: Path) -> None:
    other = tiny.verifier()
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace("assistant ", "system ")
    cached.verifier = tiny.save(other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"cached features .* are of another chat template"):
        run(cached)


def test_no_cache_there_says_how_to_write_one(cached: CommonRecipe) -> None:
    cached.data.features += "-nowhere"
    with pytest.raises(ValueError, match=r"no such cache; write it with python data/features\.py"):
        run(cached)


def test_size_is_known_and_the_disk_looked_at_before_anything_is_written(
    tmp_path: Path,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    settings = recipe(tmp_path, verifier)
    usage = features.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    out = tmp_path / "a" / "features"
    with pytest.raises(ValueError, match=r"needs 0\.\d GB more and 0\.0 GB are free; name"):
        write(settings, out)
    assert not out.parent.exists()
    tokens = sum(map(len, documents_of(settings.data.train) + documents_of(settings.data.eval)))
    said = capsys.readouterr().out
    assert f"{tokens} tokens of {4 * 32 * 4} bytes" in said
    assert f"{tokens * 512 / 1e9:.3f} GB" in said
    monkeypatch.undo()
    write(settings, out)
    stored = sum(shard.stat().st_size for shard in out.glob("*.safetensors"))
    assert stored == pytest.approx(tokens * 512, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": []}, "data: name what will be trained on"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported; use float32 or bfloat16"),
        ({"layers": [9]}, "^layers must be distinct, ascending ids in 1 … 8"),
    ],
)
def test_bad_settings_are_named(
    tmp_path: Path, verifier: str, changes: dict, message: str
) -> None:  # fmt: skip
    settings = recipe(tmp_path, verifier)
    with pytest.raises(ValueError, match=message):
        write(settings, tmp_path / "features", **changes)
    manifest = tmp_path / "features" / "manifest.json"
    assert not manifest.exists() or json.loads(manifest.read_text())["complete"]


def test_a_file_is_no_folder_for_a_cache(tmp_path: Path, verifier: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^out '.*file' is a file; pass a folder"):
        write(recipe(tmp_path, verifier), tmp_path / "file")
