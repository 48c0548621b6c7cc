"""Find the file of saved filters: in a folder here, or in a repository of the Hub."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from gfsa.plugs.saving.files import FILE, MOST_BYTES, OLD_DESCRIPTION, has_description

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB = "hub:"


@dataclass(frozen=True)
class Download:
    """Which files of a repository are meant, and how they are downloaded.

    Args:
        revision: a branch, tag or commit.
        token: of an account that may read the repository.
        subfolder: the folder of the repository that the files are in.
        cache_dir: where downloads are kept; None is the cache of huggingface_hub.
        local_files_only: take what was downloaded before, without a connection.
        force_download: download again what is in the cache.
    """

    revision: str | None = None
    token: str | bool | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False


def filter_folder(
    path: str | Path, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder with the filters of ``path``, which are downloaded if it is a name on the Hub.

    ``hub:user/name`` is a repository. ``user/name`` is one, too, unless that path exists here, or
    the folder ``user`` does: then a folder inside it is meant. Anything else is a folder.
    """
    name = str(path).removeprefix(_HUB) if isinstance(path, str) else ""
    is_name = _REPOSITORY.fullmatch(name) is not None and ".." not in name
    if isinstance(path, str) and path.startswith(_HUB):
        if not is_name:
            raise ValueError(f"expected {_HUB}user/name, got {path!r:.80}")
    elif not is_name or Path(name).exists():
        if revision is not None or token is not None:
            raise ValueError(
                "revision and token are for a repository of the Hub ('user/name'), but "
                f"{path} is a folder; leave them out"
            )
        return Path(path)
    elif Path(name).parent.exists():
        raise FileNotFoundError(
            f"{path} does not exist, though {Path(name).parent} does; for the repository of that "
            f"name on the Hub pass {_HUB + name!r}"
        )
    return download_filters(name, Download(revision, token))


def hub_library(name: str) -> Any:
    """``huggingface_hub``, or an error that says what ``name`` needs it for."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


def download_filters(name: str, wanted: Download) -> Path:
    """The folder with the filters of a repository, downloaded or from the cache."""
    try:
        hub = hub_library(f"{name!r} is no folder here; reading it from the Hub")
    except ImportError as error:
        raise FileNotFoundError(str(error)) from error
    try:
        file = _file(hub, name, FILE, wanted)
        folder = file.parent
        if not has_description(file):
            # the folder of a snapshot is named after its commit: both files are of one save
            depth = len(PurePosixPath(wanted.subfolder or "").parts)
            commit = (folder, *folder.parents)[depth].name
            _file(hub, name, OLD_DESCRIPTION, replace(wanted, revision=commit))
    # an OSError: no such repository, revision or file, no access, no connection
    except OSError as error:
        where = name if wanted.revision is None else f"{name} at {wanted.revision!r}"
        where = f"{where}, subfolder {wanted.subfolder!r}," if wanted.subfolder else where
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{where} is neither a folder here with filters that gfsa.save wrote, nor can they be "
            f"read from the Hub: {type(error).__name__}: {reason:.300}"
        ) from error
    return folder


def _file(hub: Any, name: str, file: str, wanted: Download) -> Path:
    """A file of a repository, from the cache if the Hub gives no answer.

    A file that is too large for filters is refused before it is downloaded.
    """
    if wanted.local_files_only:
        return _cached(hub, name, file, wanted, "local_files_only=True")
    url = hub.hf_hub_url(name, file, subfolder=wanted.subfolder, revision=wanted.revision)
    try:
        found = hub.get_hf_file_metadata(url, token=wanted.token)
    except Exception as error:
        if not _is_no_answer(hub, error):
            raise
        return _cached(hub, name, file, wanted, f"no answer ({error})")
    if found.size is not None and found.size > MOST_BYTES:
        raise ValueError(
            f"{file} of {name} has {found.size} bytes; filters are a few numbers per head, more "
            f"than {MOST_BYTES} is refused"
        )
    return Path(hub.hf_hub_download(name, file, **asdict(wanted)))


def _cached(hub: Any, name: str, file: str, wanted: Download, reason: str) -> Path:
    """A file that was downloaded before, without another attempt to reach the Hub."""
    offline = replace(wanted, local_files_only=True, force_download=False)
    try:
        return Path(hub.hf_hub_download(name, file, **asdict(offline)))
    except OSError as error:
        raise ConnectionError(f"{reason}, and {file} was not downloaded before") from error


def _is_no_answer(hub: Any, error: Exception) -> bool:
    """Whether the Hub gave no answer: no connection, or the client is set to be offline."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return False
    offline = isinstance(error, (hub.errors.OfflineModeIsEnabled, ConnectionError, TimeoutError))
    # the client library of huggingface_hub is httpx2, in older versions httpx or requests
    library = type(error).__module__.partition(".")[0].rstrip("0123456789")
    return offline or library in ("httpx", "httpcore", "requests")
