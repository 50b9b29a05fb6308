"""Share models on the Hugging Face Hub."""

import os
import tempfile
from pathlib import Path

from torch import nn

from eigengrain.errors import ArgumentError, FailedError, FileError
from eigengrain.models.card import CARD_FILE, ModelCard
from eigengrain.models.pretrained import CONFIG_FILE, WEIGHTS_FILE, save_pretrained


def push_to_hub(
    model: nn.Module | str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a model of eigengrain",
    card: ModelCard | None = None,
) -> str:
    """Upload a model to the Hugging Face Hub, create its repository if needed, and return the address of the commit.

    Only the weights, ``config.json`` and the model card are uploaded. With ``snapshot_download`` of the package
    huggingface_hub, ``from_pretrained(snapshot_download(repo_id))`` loads the model again.

    Args:
        model: a model, also inside DistributedDataParallel or torch.compile; or a folder of :func:`save_pretrained`, or of
            ``eigengrain train``.
        repo_id: name of the repository, ``owner/name``.
        private: create a repository that others cannot see; without effect if it exists.
        token: access token; by default that of ``hf auth login``, or of the environment variable ``HF_TOKEN``.
        message: title of the commit.
        card: for a model, what its card states about data, accuracy and licence.

    Raises:
        ArgumentError: if the name of the repository is not valid, or ``card`` is given for a folder, which has one.
        FileError: if the folder does not contain a model.
        FailedError: if the hub cannot be reached, or refuses the upload.
    """
    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, folder, card=card)
            return push_to_hub(folder, repo_id, private=private, token=token, message=message)
    if card is not None:
        raise ArgumentError("card", "is for a model: a folder has its own", remedy=f"edit {CARD_FILE} in the folder")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    path = next((each for each in (Path(model), Path(model) / "model") if (each / CONFIG_FILE).is_file()), None)
    if path is None or not (path / WEIGHTS_FILE).is_file():
        raise FileError(Path(model), f"it does not contain a model ({CONFIG_FILE} and {WEIGHTS_FILE})")
    api = HfApi(token=token, library_name="eigengrain")
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        files = [WEIGHTS_FILE, CONFIG_FILE, CARD_FILE]
        return str(api.upload_folder(repo_id=repository, folder_path=path, allow_patterns=files, commit_message=message))
    except HFValidationError as error:
        raise ArgumentError("repo_id", "must be owner/name", repo_id) from error
    except LocalTokenNotFoundError as error:
        raise FailedError("there is no access token for the hub: run 'hf auth login' first, or set HF_TOKEN") from error
    except Exception as error:  # also those of the HTTP library, which have no common class with the others
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FailedError(f"the hub did not accept the model: {reason}") from error
