"""A model folder in the spelling of transformers 5."""

import json
from pathlib import Path


def with_moved_rope(model: Path, folder: Path, **parameters: object) -> Path:
    """A copy of a model folder, by links, whose `rope_theta` and `parameters` are in `rope_parameters` of config.json."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    moved = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": moved | parameters}))
    return folder
