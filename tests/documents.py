"""Documents of a run folder as somebody with an editor leaves them, with checksums that fit."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from polymode.storage import checksum, write_document


def edit(path: Path, **changes) -> None:
    """Change entries of a document, named by their paths with "__", and write its checksum anew."""
    document = json.loads(path.read_text())
    what = document.pop("what")
    for place, value in changes.items():
        *steps, last = place.split("__")
        part = document
        for step in steps:
            part = part[int(step) if step.isdigit() else step]
        part[last] = value
    del document["format_version"], document["sha256"]
    write_document(path, what, document)


def edit_tensors(posterior: Path, name: str, change) -> None:
    """Replace the tensors of a file by what ``change`` makes of them, with a checksum that fits."""
    save_file(change(load_file(posterior / name)), posterior / name)
    document = json.loads((posterior / "posterior.json").read_text())
    edit(posterior / "posterior.json", files=document["files"] | {name: checksum(posterior / name)})
