"""Files of weights that whoever may read their folder may read too.

safetensors makes its files for their owner alone, whatever the umask says, and a server that runs
as another user would then find a checkpoint that it cannot open.
"""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    """Write a file in safetensors, with the mode of any new file.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    save_file(tensors, path, metadata=metadata)
    follow_umask(path)


def follow_umask(*paths: Path) -> None:
    """Give files the mode that a new one beside them gets."""
    for path in paths:
        like = path.with_name(f".{path.name}.mode")  # asking for the umask would change it
        like.touch()
        mode = like.stat().st_mode
        like.unlink()
        path.chmod(mode)
