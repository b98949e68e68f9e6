"""Files of an adapter to and from the Hugging Face hub: which repository, which revision, what may be downloaded.

A revision is resolved to its commit before anything else is asked for, so that all files are of one commit. Only files
by the names that are asked for are downloaded, and only if the hub says that they are not too large; where it sends
more than that, the download ends. The token is `huggingface_hub`'s affair (`hf auth login`, HF_TOKEN): it is no
argument of ours and in no sentence.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError
from perlclip.files import MIB

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([^\s@:?#\\]{{1,250}}))?")
_COMMIT = re.compile("[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """A repository of the hub and one of its revisions: a branch, a tag or a commit; None is the newest."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> "HubName | None":
        """`user/repo` or `user/repo@revision`; None for what has another form."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in found[1] or "--" in found[1]:  # neither is a name there
            return None
        if revision is not None and found[2]:
            raise PerlclipError(f"{text} names a revision already; leave one of the two out")
        return cls(found[1], revision or found[2])

    @classmethod
    def of(cls, text: str, revision: str | None = None) -> "HubName":
        """The same, where nothing else will do."""
        found = cls.parse(text, revision)
        if found is None:
            raise PerlclipError(f"{text!r} is no repository of the hub: expected user/repo or user/repo@revision")
        return found

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


@dataclass(frozen=True)
class Download:
    """A folder of the hub's cache that holds the files, and the commit that they are of."""

    folder: Path
    repo: str
    revision: str

    def record(self) -> dict[str, str]:
        """As it stands in an adapter's config."""
        return {"repo": self.repo, "revision": self.revision}


def download(name: HubName, largest: Mapping[str, int], optional: str) -> Download:
    """The files by these names, each no larger than said; one may be missing. Without a network the cached ones."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    with _in_one_sentence(name):
        try:
            found = HfApi(library_name="perlclip").model_info(name.repo, revision=name.revision, files_metadata=True)
        except _no_answer() as error:
            kept = try_to_load_from_cache(name.repo, next(iter(largest)), revision=name.revision)
            if isinstance(error, HfHubHTTPError) or not isinstance(kept, str):
                raise
            return Download(Path(kept).parent, name.repo, Path(kept).parent.name)
        commit = str(found.sha)
        if not _COMMIT.fullmatch(commit) or (_COMMIT.fullmatch(name.revision or "") and commit != name.revision):
            raise PerlclipError(f"the hub answered with revision {commit[:60]!r} where {name} was asked for")
        sizes = {file.rfilename: file.size for file in found.siblings or ()}
        wanted = [file for file in largest if file in sizes or file != optional]
        for file in wanted:
            if file not in sizes:
                raise PerlclipError(f"{name} on the hub is not an adapter: it has no {file}")
            size = sizes[file]
            if size is None or size > largest[file]:
                said = "unknown size" if size is None else f"{size / MIB:,.0f} MiB"
                raise PerlclipError(
                    f"{file} of {name} is not downloaded: {said}, and {largest[file] // MIB} are allowed"
                )
        # The first by the name that was given, which the cache then knows without a network, the others by the commit.
        revisions = [name.revision, *[commit] * (len(wanted) - 1)]
        folders = {
            Path(
                hf_hub_download(
                    name.repo, file, revision=revision, library_name="perlclip",
                    tqdm_class=_no_more_than(largest[file], f"{file} of {name}"),
                )
            ).parent
            for file, revision in zip(wanted, revisions, strict=True)
        }  # fmt: skip
    if [folder.name for folder in folders] != [commit]:
        raise PerlclipError(f"{name} changed on the hub while it was downloaded: try again")
    return Download(folders.pop(), name.repo, commit)


def upload(name: HubName, contents: Mapping[str, bytes], *, private: bool, message: str) -> str:
    """One commit with these files, in a repository that is made if there is none; says which commit."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    with _in_one_sentence(name):
        if get_token() is None:
            raise PerlclipError(f"cannot push to {name} without a token of the hub: {LOG_IN}")
        api = HfApi(library_name="perlclip")
        api.create_repo(name.repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(file, content) for file, content in contents.items()]
        made = api.create_commit(name.repo, operations, commit_message=message, revision=name.revision)
    return str(made.oid)


def _no_more_than(limit: int, what: str) -> type[Any]:
    """A progress bar, which the client tells what came: it ends the download of a file that goes on too long."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counted(tqdm):
        came = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self.came += n or 0
            if self.came > limit:
                raise PerlclipError(f"{what} is larger than the hub said: more than {limit / MIB:,.0f} MiB came")
            shown: bool | None = super().update(n)
            return shown

    return Counted


def _no_answer() -> tuple[type[Exception], ...]:
    """What the client raises where nobody answers: of `httpx`, by whatever name it comes with."""
    from huggingface_hub import errors

    http: type[Exception] = vars(errors)["HTTPError"]
    return http, ConnectionError, TimeoutError, errors.LocalEntryNotFoundError


@contextmanager
def _in_one_sentence(name: HubName) -> Iterator[None]:
    """What the client says takes paragraphs, with addresses and request numbers."""
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = are_progress_bars_disabled()
    disable_progress_bars()  # an adapter takes no time
    try:
        yield
    except errors.GatedRepoError as error:
        raise PerlclipError(
            f"{name} is gated: ask for access on its page at the hub, then {LOG_IN} (an account that has it)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PerlclipError(f"{name.repo} on the hub has no revision {name.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise PerlclipError(f"the hub has no repository {name.repo}, or it is private: {LOG_IN}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"this account may not do that: {LOG_IN}" if status in (401, 403) else f"HTTP status {status}"
        raise PerlclipError(f"the hub refused the request for {name}: {reason}") from error
    except errors.HFValidationError as error:
        raise PerlclipError(f"{name} is no name that the hub allows") from error
    except _no_answer() as error:
        raise PerlclipError(f"the hub cannot be reached for {name} ({type(error).__name__})") from error
    except (OSError, ValueError) as error:  # of this machine's disk, or an answer that makes no sense
        raise PerlclipError(f"the hub and {name}: {' '.join(str(error).split())}") from error
    finally:
        if not quiet:
            enable_progress_bars()
