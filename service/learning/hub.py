"""An adapter as a repository on the Hugging Face hub: its folder and a model card."""

from __future__ import annotations

from pathlib import Path

from service.core import AdapterRef, BadRequest, RedraftError, Verdict
from service.learning.export import export_adapter

CARD = "README.md"


def write_folder(
    ref: AdapterRef, folder: Path, *, base_model: str, target: str, texts: int, verdict: Verdict | None
) -> None:
    """Writes an adapter in mlx-lm's format, with its model card, to the new folder `folder`.

    base_model: the draft's name on the hub. target: name of the model it drafts for. texts: number of recorded texts
    its run learnt from. verdict: the gate's, or None. Raises AdapterRefused when its files were altered, BadRequest
    when `folder` exists.
    """
    export_adapter(ref, folder)
    (folder / CARD).write_text(card(ref, base_model, target, texts, verdict), encoding="utf-8")


def card(ref: AdapterRef, base_model: str, target: str, texts: int, verdict: Verdict | None) -> str:
    """The text of the model card, starting with the hub's metadata. Arguments as in `write_folder`."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base_model,
        library_name="mlx",
        tags=["lora", "redraft", "speculative-decoding"],
        base_model_relation="adapter",
    )
    judged = ""
    if verdict is not None:
        gain, low, high = (f"{value:+.1%}" for value in (verdict.gain, verdict.low90, verdict.high90))
        judged = (
            f"On {verdict.prompts} held-out texts of that traffic, the prediction is {gain} tokens per second over the adapter "
            f"or draft that served before (90 % interval {low} to {high}).\n\n"
        )
    return (
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# A draft adapter for {target}\n\n"
        f"LoRA of rank {ref.rank} for the draft `{base_model}`, which proposes tokens for {target} in speculative decoding. It "
        "changes how many proposals are accepted, not the target's output.\n\n"
        f"Trained by Redraft while it served, on {texts} recorded texts. {judged}"
        "It was trained on the target's answers to the requests of one server, and may reveal what they were about.\n\n"
        f"Adapter {ref.id}, trained on {f'adapter {ref.parent}' if ref.parent else 'the base draft'}; fingerprint of the draft "
        f"`{ref.draft}`.\n\n"
        f"    mlx_lm.generate --model {base_model} --adapter-path FOLDER --prompt TEXT\n"
    )


def push(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder as a model repository, creating it if necessary. Returns its URL. Raises BadRequest for a name
    that the hub does not allow, RedraftError for any other refusal."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            # An existing repository keeps its visibility.
            raise BadRequest(f"{repo} already exists and is public: choose another name, or publish with --public")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except BadRequest:
        raise
    except HFValidationError as error:
        raise BadRequest(f"{repo} is not a valid repository name: {error}", field="repo") from error
    except Exception as error:  # the client raises errors of its HTTP library, which may change
        raise RedraftError(
            f"the hub refused the upload: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    return str(url)
