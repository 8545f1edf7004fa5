"""Upload of a model folder to the Hugging Face hub; whether it can work is asked before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.hub import why_unreachable

WHERE = "--push"


def prepare(repository: str, *, private: bool) -> str:
    """Make the repository on the hub unless it is there, and return its full name.

    Args:
        repository: ``ORGANISATION/NAME``, or ``NAME`` for one of the person's own.
        private: whether a repository that is made is private; one that is there stays as it is.

    Raises:
        UserError: the name is none, nobody is logged in, the hub is not to be asked or does not answer, or it refuses.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(
            f"{repository!r} is no name of a repository: {error}", where=WHERE, remedy="give ORGANISATION/NAME"
        ) from error
    if (why := why_unreachable(constants.ENDPOINT, constants.HF_HUB_OFFLINE)) is not None:
        raise UserError(
            f"the model cannot be pushed to {repository}: {why}",
            where=WHERE,
            remedy="leave --push out, and upload the folder later: hf upload " + f"{repository} OUTPUT",
        )
    if not get_token():
        raise UserError(
            f"the model cannot be pushed to {repository}: nobody is logged in at the hub",
            where=WHERE,
            remedy="hf auth login, or set HF_TOKEN to a token that may write",
        )
    made = _ask(repository, lambda: HfApi().create_repo(repository, private=private, exist_ok=True, repo_type="model"))
    return str(made.repo_id)


def upload(folder: Path, repository: str, message: str) -> str:
    """Upload a folder as one commit, and return the address of the repository.

    Raises:
        UserError: the hub refuses or does not answer; the folder stays.
    """
    from huggingface_hub import HfApi, constants

    _ask(
        repository,
        lambda: HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message),
        remedy=f"the folder {folder} is whole; try again with: hf upload {repository} {folder}",
    )
    return f"{constants.ENDPOINT}/{repository}"


def _ask(repository: str, call: Any, remedy: str | None = None) -> Any:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return call()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = (error.server_message or str(error)).strip().partition("\n")[0][:200]
        told = {401: "the token is not valid", 403: "the token may not write there"}.get(status or 0, reason)
        token = "hf auth login with a token that may write" if status in (401, 403) else None
        raise UserError(
            f"the hub does not take {repository}: {told} (HTTP {status})", where=WHERE, remedy=token or remedy
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise UserError(
            f"the hub does not answer for {repository}: {type(error).__name__} {error}"[:300],
            where=WHERE,
            remedy=remedy,
        ) from error
