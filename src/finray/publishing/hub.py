"""The Hub as finray uses it: user, permissions, and one commit of several files, with retries.

`huggingface_hub` communicates with the Hub and uploads. It retries some of its requests but not others, so all of it
runs in :meth:`Hub._tried`: failures that a retry may fix are retried a few times, and all others become one
:class:`HubError` that names the URL, without its query (a signed URL is a secret) and without the token.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from finray import compat
from finray.config.adapter_files import NOTES, PROCESSOR_FILES, SETTINGS
from finray.config.export import hub_id
from finray.config.redact import MASK, redact_text
from finray.errors import FinrayError, HubError, ModelError

T = TypeVar("T")
# Attempts of one `huggingface_hub` call.
TRIES = 5
# Seconds: before the second attempt, at most before later ones, and without a byte from the Hub.
FIRST_WAIT, LONGEST_WAIT, SILENCE = 2.0, 120.0, 60.0
# A conflict is another commit at the same time.
_AGAIN = {408, 409, 412, 425, 429}
# A repository that has finray's notes was pushed by finray.
MARK = NOTES
# The files of a model directory that are pushed. Those of an earlier push would be loaded together with the new model.
MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "config.json", "generation_config.json", SETTINGS, MARK),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.jinja"),
    *("additional_chat_templates/*.jinja", "Modelfile", *PROCESSOR_FILES),
)
# Pushed as well; there they stay until they are replaced.
DOCUMENTS = ("README.md", "LICENSE*", "NOTICE*")
# A repository that has one of these, in whatever folder, holds a model.
_HOLDS_MODEL = ("*.safetensors", "*.safetensors.index.json", "*.bin", SETTINGS, "config.json", "generation_config.json")
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")
_TOKEN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access, from the Hub's settings"
_LATER = "the same command continues: files that arrived are not sent again"


@dataclass(frozen=True, slots=True)
class Target:
    """A model on the Hub to push to.

    Attributes:
        repo: ``OWNER/NAME``.
        is_private: whether it is private, or will be when it is created.
        exists: whether it exists.
        files: its files.
    """

    repo: str
    is_private: bool
    exists: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a push."""

    url: str
    oid: str


class Hub:
    """A connection to a Hub.

    Args:
        token: of the user.
        endpoint: URL of the Hub; None for that of ``HF_ENDPOINT``.
        wait: sleeps for the given seconds, and returns true if retries must stop; None only sleeps.
    """

    def __init__(self, token: str, *, endpoint: str | None = None, wait: Callable[[float], bool] | None = None) -> None:
        from huggingface_hub import HfApi

        compat.check_etags()
        self._token, self._wait = token, wait or threading.Event().wait
        self._api = HfApi(endpoint=endpoint, token=token, library_name="finray")
        self.endpoint: str = self._api.endpoint

    @classmethod
    def login(cls, **options: Any) -> Hub:
        """The Hub, as the user of ``HF_TOKEN`` or of the login.
        Raises HubError: there is no token, or Hub access is disabled."""
        from huggingface_hub import constants, get_token

        if constants.is_offline_mode():
            raise HubError(
                "the Hub is not used: HF_HUB_OFFLINE is set, or the Hub did not answer before",
                where=constants.ENDPOINT,
                repair="unset HF_HUB_OFFLINE, or try again later: `finray push`, `finray pull`",
            )
        token = get_token()
        if not token:
            raise HubError("the Hub needs a token, and there is none", where=constants.ENDPOINT, repair=_TOKEN)
        return cls(token, **options)

    def check(self, name: str, *, public: bool = False) -> Target:
        """Check that pushing to a model is allowed, before anything is created or sent.

        Args:
            name: ``OWNER/NAME``; without an owner, the user's.
            public: whether it will be public.

        Raises:
            HubError: it is not allowed: the token is refused or read-only, the name belongs to somebody else or to
                another model, or the model is public and must not be.
        """
        user = self._tried(f"{self.endpoint}/api/whoami-v2", self._api.whoami)
        user_name = str(user["name"])
        repo = name if "/" in name else f"{user_name}/{name}"
        url = f"{self.endpoint}/{repo}"
        try:
            hub_id(repo)
        except ValueError as error:
            raise HubError(str(error), where=name, repair="give the name with --to OWNER/NAME") from None
        role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise HubError("the token has read access only", where=url, repair=_TOKEN)
        roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs") or ()}
        owner = repo.partition("/")[0]
        if owner != user_name and roles.get(owner, "read") == "read":
            accounts = ", ".join([user_name, *sorted(org for org, role in roles.items() if role != "read")])
            why = "may only read there" if owner in roles else "is not a member of it"
            raise HubError(
                f"the name belongs to {owner}, not to {user_name}, who {why}",
                where=url,
                repair=f"push to a name of: {accounts}",
            )
        info = self._tried(url, lambda: self._info(repo))
        if info is None:
            return Target(repo, not public)
        files = tuple(sibling.rfilename for sibling in info.siblings or ())
        is_model = any(fnmatch.fnmatchcase(name, pattern) for name in files for pattern in _HOLDS_MODEL)
        if MARK not in files and f"last-checkpoint/{MARK}" not in files and is_model:
            raise HubError(
                "the name is taken by a model that was not pushed by finray",
                where=url,
                repair="push to another name, or delete that model on the Hub first",
            )
        if not info.private and not public:
            raise HubError(
                "the model is public on the Hub, but finray pushes private models by default",
                where=url,
                repair="push with --public (export.public: true), to another name, or make it private on the Hub",
            )
        return Target(repo, bool(info.private), True, files)

    def _info(self, repo: str) -> Any | None:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self._api.model_info(repo, timeout=SILENCE)
        except RepositoryNotFoundError:
            return None

    def card_of(self, model: str) -> dict[str, Any]:
        """The front matter of a model's card; empty if there is none, or it is not available."""
        try:
            info = self._tried(f"{self.endpoint}/{model}", lambda: self._api.model_info(model, timeout=SILENCE))
        except FinrayError:
            return {}
        detail: Any = None if info is None else info.card_data
        return {} if detail is None else dict(detail.to_dict())

    def push(
        self,
        target: Target,
        files: Mapping[str, Path | bytes],
        *,
        message: str,
        folder: str = "",
        only: bool = False,
    ) -> Commit:
        """Upload files and commit them atomically; the model is created if needed.

        Args:
            target: the checked target.
            files: by their names in the folder.
            message: of the commit.
            folder: folder in the repository; empty means its root.
            only: whether to remove all other files in the folder, and not only those that would be loaded with these.

        Raises:
            HubError: the Hub refuses, or does not answer.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        url, prefix = f"{self.endpoint}/{target.repo}", f"{folder}/" if folder else ""
        if not target.exists:
            private = target.is_private
            self._tried(url, lambda: self._api.create_repo(target.repo, private=private, exist_ok=True))

        def commit() -> Commit:
            # A commit whose response was lost may exist: list the files again.
            info = self._api.model_info(target.repo, timeout=SILENCE)
            there = [sibling.rfilename for sibling in info.siblings or () if sibling.rfilename.startswith(prefix)]
            names = [file.removeprefix(prefix) for file in there]
            # A `*` stands for no `/`, as it does where they are pushed from.
            like = {
                name for form in MODEL for name in fnmatch.filter(names, form) if name.count("/") == form.count("/")
            }
            gone = names if only else sorted(like)
            made: Any = self._api.create_commit(
                target.repo,
                [
                    *(CommitOperationDelete(f"{prefix}{name}") for name in gone if name not in files),
                    *(CommitOperationAdd(f"{prefix}{name}", file) for name, file in sorted(files.items())),
                ],
                commit_message=message,
            )
            return Commit(str(made.commit_url), str(made.oid))

        return self._tried(url, commit)

    def download(self, name: str, folder: str) -> Path:
        """A folder of a repository's newest commit, in the cache of the Hub.
        Raises HubError: it cannot be downloaded."""

        def fetch() -> str:
            # Of a branch, the client takes the commit in its cache if the Hub fails: an earlier one, and says nothing.
            commit = self._api.model_info(name, timeout=SILENCE).sha
            return str(self._api.snapshot_download(name, revision=commit, allow_patterns=[f"{folder}/**"]))

        return Path(self._tried(f"{self.endpoint}/{name}", fetch)) / folder

    def _tried(self, url: str, call: Callable[[], T]) -> T:
        """The result of a call, with retries if they may help. Raises HubError: it failed for good."""
        from huggingface_hub import get_session

        pause = FIRST_WAIT
        for tries in range(1, TRIES + 1):
            try:
                with _quiet():
                    # By default the client waits forever.
                    get_session().timeout = SILENCE
                    return call()
            except FinrayError:
                raise
            except Exception as error:
                failure = _failure(error)
                if failure is None:
                    raise
                if not failure.again or tries == TRIES or self._wait(failure.wait(pause)):
                    raise self._explained(failure, url, tries) from None
                pause = min(2 * pause, LONGEST_WAIT)
        raise AssertionError

    def _explained(self, failure: _Failure, url: str, tries: int) -> HubError:
        often = f", {tries} times" if tries > 1 else ""
        detail = redact_text(failure.detail.replace(self._token, MASK)).strip()
        where = failure.url or url
        match failure.status:
            case 401:
                return HubError("the Hub rejects the token (401)", where=where, repair=_TOKEN)
            case 403:
                text = f"the token has no permission for this (403){': ' + detail if detail else ''}"
                return HubError(text, where=where, repair=f"push under your own name, or {_TOKEN}")
            case None:
                text = f"the Hub does not answer{often}: {detail}"
            case 0:
                text = f"the Hub cannot take it: {detail}"
            case status:
                text = f"the Hub refuses with {status}{often}{': ' + detail if detail else ''}"
        return HubError(text, where=where, repair=_LATER if failure.again else "see the message of the Hub")


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed request: the HTTP status (0 if the client refuses, None without an answer), the message, the URL, and
    the requested seconds to wait."""

    status: int | None
    detail: str
    url: str | None = None
    after: float | None = None

    @property
    def again(self) -> bool:
        return self.status is None or self.status in _AGAIN or self.status >= 500

    def wait(self, pause: float) -> float:
        return min(LONGEST_WAIT, pause if self.after is None else max(pause, self.after))


def _failure(error: BaseException) -> _Failure | None:
    """The failure behind an exception of `huggingface_hub`; None if it is a bug."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            answer = cause.response
            requested = urlsplit(str(answer.request.url))
            after = answer.headers.get("Retry-After", "")
            try:
                seconds = float(after)
            except ValueError:
                seconds = math.nan
            detail = cause.server_message or ""
            url = f"{requested.scheme}://{requested.netloc.rpartition('@')[2]}{requested.path}"
            return _Failure(answer.status_code, detail, url, seconds if math.isfinite(seconds) else None)
        # `hf_xet` sends the weights, and reports a status only as text.
        if type(cause).__module__.startswith("hf_xet"):
            return _Failure(401 if isinstance(cause, PermissionError) else None, str(cause))
        # The client's own errors: `httpx`, or `httpx2` with newer versions of `huggingface_hub`.
        if type(cause).__module__.partition(".")[0].startswith("httpx") or isinstance(cause, ConnectionError):
            detail = str(cause) or type(cause).__name__
            status = _XET_STATUS.search(detail)
            return _Failure(None if status is None else int(status[1]), detail)
        cause = cause.__cause__ or cause.__context__
    # A README whose front matter is not valid, a quota that is used up, or an answer that `hf_xet` cannot read.
    return _Failure(0, str(error)) if isinstance(error, ValueError | RuntimeError) else None


def public_name(base: str | None, named: str | None, *, merged: bool) -> str | None:
    """The Hub name of the base of what is pushed; None if it has none, and none is needed.

    Args:
        base: the base model as known on this machine; None if there is none.
        named: the user's setting.
        merged: whether a whole model is pushed, which is loaded without its base.

    Raises:
        ModelError: an adapter would be pushed, and nobody could load it.
    """
    if named is not None and not Path(named).expanduser().is_dir():
        return named
    if base is None:
        return None
    if not Path(base).expanduser().exists() and not base.startswith(("/", "~", ".")):
        return base
    if not merged:
        raise ModelError(
            "the base model is a local directory, which users of the adapter on the Hub do not have",
            where=f"base model {base}",
            repair="give the base model's name on the Hub (--base OWNER/NAME, export.base_model), or push with "
            "--merged "
            "(export.merged: true)",
        )
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the client's warnings: they hold signed URLs, and unresolved failures become errors anyway."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
