"""Where the object stores of lakes are and how they are entered: one set of options for obstore, delta-rs and Spark.

What a pipeline file says of its store (`lake.storage`, its `profile` by way of `headwater.store_profiles`, and
`lake.airflow` by way of `headwater.store_connections`) is kept here for the process, by the lake's root; what it does
not say comes from the environment, as the libraries read it: `AWS_*`, `AZURE_*`, `GOOGLE_*`, and behind them the
identity of the machine. A place of a lake that no pipeline file of this process names has the environment's alone.

Secrets are held, never shown: no repr has them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import HeadwaterError, Refused

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 10
JOB_PATIENCE_SECONDS: Final = 75
"""For how long a request is repeated by the libraries: a person wants to hear that a store is away; a job rides it out
for a minute. What goes on longer is a failure of the batch, which is tried again as a whole."""
_RETRIES: Final = 100
_LONGEST_PAUSE_SECONDS: Final = 2
_REQUEST_SECONDS: Final = 30
UPLOAD_SECONDS: Final = 300
"""Of a request that carries much, which shares a thin line with all others that are under way."""
_DEFAULT_REGION: Final = "us-east-1"
"""Of a server that is not the cloud's own, as obstore has it."""
_HADOOP_CREDENTIALS: Final = (
    # Keys that the settings give; then the environment, a web identity, a profile, the container's or the machine's.
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
)
_HADOOP_SECRETS: Final = {
    "access_key_id": "access.key",
    "secret_access_key": "secret.key",
    "session_token": "session.token",
}
"""Named so that Spark shows none of them: see `spark.redaction.regex`."""
_AZURE_ENVIRONMENT: Final = {
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "tenant_id": ("AZURE_TENANT_ID",),
    "client_id": ("AZURE_CLIENT_ID",),
    "client_secret": ("AZURE_CLIENT_SECRET",),
    "token_file": ("AZURE_FEDERATED_TOKEN_FILE",),
}
"""Where obstore and delta-rs find them, which Hadoop's connector does not."""
_ENVIRONMENT_OF: Final = {
    **_AZURE_ENVIRONMENT,
    "bearer_token": ("AZURE_STORAGE_TOKEN",),
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN", "AWS_TOKEN", "SESSION_TOKEN", "TOKEN"),
}
"""By which variables obstore or delta-rs takes a secret that it is not given."""
_TAKEN_WITH: Final = {
    "access_key_id": ("secret_access_key", "session_token"),
    "secret_access_key": ("access_key_id", "session_token"),
    "session_token": ("access_key_id", "secret_access_key"),
    "account_key": ("bearer_token",),
    "client_secret": ("bearer_token", "account_key", "token_file"),
    "sas_token": ("bearer_token", "account_key", "token_file", "client_secret"),
}
"""The secrets of the environment that they take beside one that they are given (Amazon), or before it (Azure)."""


def refuse_foreign_secrets(secrets: Mapping[str, str], whose: str, where: str) -> None:
    """Refused if libraries would enter the store with others than `secrets`, those of `whose`, because of what the
    environment has: nothing that they are told keeps them from it. `where`: the pipeline file and its setting, as
    `shop.yaml: lake.airflow`."""
    missing = {other for name in secrets for other in _TAKEN_WITH.get(name, ()) if other not in secrets}
    if found := [variable for name in missing for variable in _ENVIRONMENT_OF[name] if variable in os.environ]:
        variables = ", ".join(sorted(found))
        raise Refused(
            f"libraries would take {variables} of the environment with the keys of {whose}, or instead of them",
            code="bad_configuration",
            where=where,
            remedy=f"unset {variables} where this runs, or take {where.rpartition(': ')[2]} out of the file",
        )


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`endpoint`: the address of a server that is not the cloud's own; `path_style`: its buckets are parts of paths,
    not of host names (None: where there is an endpoint); `secrets`: by the names that obstore has for them."""

    endpoint: str = ""
    region: str = ""
    path_style: bool | None = None
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def is_plain_http(self) -> bool:
        return self.address.startswith("http://")

    @property
    def address(self) -> str:
        return self.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")

    def open(self, scheme: str, bucket: str, *, uploads: bool = False) -> ObjectStore:
        """The store of `<scheme>://<bucket>`. `uploads`: for requests that carry much."""
        from obstore.store import AzureStore, GCSStore, S3Store

        config: Any = self._of(scheme, bucket)
        seconds = UPLOAD_SECONDS if uploads else _REQUEST_SECONDS
        client: Any = {"timeout": f"{seconds}s", "allow_http": self.is_plain_http}
        retries: Any = {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=patience()),
            "backoff": {"max_backoff": timedelta(seconds=_LONGEST_PAUSE_SECONDS)},
        }
        if scheme == "s3":
            return S3Store(bucket, config=config, client_options=client, retry_config=retries)
        if scheme == "gs":
            return GCSStore(bucket, config=config, client_options=client, retry_config=retries)
        container = bucket.partition("@")[0]
        return AzureStore(container, config=config, client_options=client, retry_config=retries)

    def delta_rs(self, place: str) -> dict[str, str]:
        """The same for a table at `place`, as delta-rs is told it."""
        scheme, _, path = place.partition("://")
        return {
            **self._of(scheme, path.partition("/")[0]),
            "allow_http": str(self.is_plain_http).lower(),
            "timeout": f"{_REQUEST_SECONDS}s",
            "max_retries": str(_RETRIES),
            "retry_timeout": f"{patience()}s",
            "backoff_config.max_backoff": f"{_LONGEST_PAUSE_SECONDS}s",
        }

    def hadoop(self, place: str) -> dict[str, str]:
        """The same, as Hadoop's connector for S3 or for Azure is told it: of the bucket or account of `place` alone, so
        that others that a job reads are entered as the job wants. What is not said here is left to the connector."""
        return self._hadoop_azure(place) if place.startswith("abfss://") else self._hadoop_s3(place)

    def _hadoop_azure(self, place: str) -> dict[str, str]:
        known = dict(self.secrets) or _of_azures_environment()
        if "account_key" in known:
            found = {"account.auth.type": "SharedKey", "account.key": known["account_key"]}
        elif "sas_token" in known:
            found = {"account.auth.type": "SAS", "sas.fixed.token": known["sas_token"].removeprefix("?")}
        else:
            found = {"account.auth.type": "OAuth", **_azure_identity(known)}
        account = place.partition("://")[2].partition("/")[0].partition("@")[2]
        return {**self._azure_emulator(), **{f"fs.azure.{name}.{account}": value for name, value in found.items()}}

    def _azure_emulator(self) -> dict[str, str]:
        """Of a server that is not the cloud's own: an account's name is part of a path there, and blobs are all."""
        if not self.endpoint:
            return {}
        scheme, _, rest = self.endpoint.partition("://")
        found = {
            "fs.azure.abfs.endpoint": rest.partition("/")[0],
            "fs.azure.account.hns.enabled": "false",
            "fs.azure.fns.account.service.type": "BLOB",
        }
        if scheme == "http":
            # `abfss` means TLS, unless another class has the name; and Apache's client is not made without TLS.
            found["fs.azure.always.use.https"] = "false"
            found["fs.azure.networking.library"] = "JDK_HTTP_URL_CONNECTION"
            found["fs.abfss.impl"] = "org.apache.hadoop.fs.azurebfs.AzureBlobFileSystem"
            found["fs.AbstractFileSystem.abfss.impl"] = "org.apache.hadoop.fs.azurebfs.Abfs"
        return found

    def _hadoop_s3(self, place: str) -> dict[str, str]:
        found = {
            "path.style.access": "true" if self._by_path else "false",
            "aws.credentials.provider": ",".join(_HADOOP_CREDENTIALS),
            # The default of the connector's version keeps what it knows of an object for a day, under the object's
            # name, and up to 2 GB of contents in the driver's memory.
            "input.stream.type": "classic",
        }
        if self.address:
            found["endpoint"] = self.address
        region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "")
        if region or self.address:
            found["endpoint.region"] = region or _DEFAULT_REGION
        found |= {_HADOOP_SECRETS[name]: value for name, value in self.secrets if name in _HADOOP_SECRETS}
        bucket = place.partition("://")[2].partition("/")[0]
        of_bucket = {f"fs.s3a.bucket.{bucket}.{name}": value for name, value in found.items()}
        return {"fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem", **of_bucket}

    @property
    def _by_path(self) -> bool:
        return bool(self.address) if self.path_style is None else self.path_style

    def _of(self, scheme: str, bucket: str) -> dict[str, str]:
        """In the words that obstore and delta-rs share."""
        found = dict(self.secrets)
        if scheme == "s3":
            found |= {"conditional_put": "etag", "virtual_hosted_style_request": str(not self._by_path).lower()}
            found |= {"region": self.region} if self.region else {}
            found |= {"endpoint": self.address} if self.address else {}
        if scheme == "abfss":
            found["account_name"] = bucket.partition("@")[2].partition(".")[0]
            found |= {"endpoint": self.endpoint} if self.endpoint else {}
        return found


def _of_azures_environment() -> dict[str, str]:
    found = {}
    for name, variables in _AZURE_ENVIRONMENT.items():
        if value := next(filter(None, map(os.environ.get, variables)), None):
            found[name] = value
    return found


def _azure_identity(known: Mapping[str, str]) -> dict[str, str]:
    """A service principal, one whose token lies in a file, or the identity of the machine."""
    provider, found = "MsiTokenProvider", {}
    if "client_secret" in known:
        provider = "ClientCredsTokenProvider"
        authority = os.environ.get("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.com").rstrip("/")
        found["client.endpoint"] = f"{authority}/{known.get('tenant_id', '')}/oauth2/token"
        found["client.secret"] = known["client_secret"]
    elif "token_file" in known:
        provider = "WorkloadIdentityTokenProvider"
        found["token.file"] = known["token_file"]
        found["msi.tenant"] = known.get("tenant_id", "")
    if "client_id" in known:
        found["client.id"] = known["client_id"]
    of_oauth = {f"account.oauth2.{name}": value for name, value in found.items()}
    return {"account.oauth.provider.type": f"org.apache.hadoop.fs.azurebfs.oauth2.{provider}", **of_oauth}


@dataclass(slots=True)
class _Renewal:
    """`fetch` gives options, and for how many seconds they are good; `due`: when it is asked again, by the process's
    own clock. `key` tells two that ask for something else apart."""

    key: Hashable
    fetch: Callable[[], tuple[StoreOptions, float]]
    due: float = 0.0


_known: dict[str, StoreOptions] = {}
_renewals: dict[str, _Renewal] = {}
_FAILED_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 300.0
"""Keys that do not expire may be exchanged by a person."""
_BEFORE_SECONDS: Final = 600.0
_SOONEST_SECONDS: Final = 30.0
_is_patient = False
_here = threading.local()
_ENVIRONMENT = StoreOptions()


def be_patient() -> None:
    """A job begins in this process."""
    global _is_patient
    _is_patient = True


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """What this thread asks inside the block is not repeated for as long as a job otherwise would."""
    _here.is_impatient = True
    try:
        yield
    finally:
        _here.is_impatient = False


def patience() -> int:
    """Seconds."""
    return JOB_PATIENCE_SECONDS if _is_patient and not getattr(_here, "is_impatient", False) else PATIENCE_SECONDS


def register(root: str, options: StoreOptions) -> None:
    """A pipeline file says this of its lake."""
    _renewals.pop(root, None)
    _known[root] = options


def register_renewed(root: str, key: Hashable, fetch: Callable[[], tuple[StoreOptions, float]]) -> None:
    """`fetch` says this of the lake, for so many seconds: now, and whenever they are over. What it raises now is
    raised; later, what was known goes on to be used. Where `key` says that the same is asked already, nothing
    happens."""
    known = _renewals.get(root)
    if known is None or known.key != key:
        options, seconds = fetch()
        _known[root], _renewals[root] = options, _Renewal(key, fetch, time.monotonic() + seconds)


def seconds_good(until: float | None) -> float:
    """For how long keys are used that are good until then, in seconds since 1970; None: they do not expire."""
    return _AGAIN_SECONDS if until is None else max(until - time.time() - _BEFORE_SECONDS, _SOONEST_SECONDS)


def _in_time(root: str) -> None:
    renewal = _renewals.get(root)
    if renewal is None or time.monotonic() < renewal.due:
        return
    renewal.due = time.monotonic() + _FAILED_SECONDS  # other threads go on meanwhile with what there is
    try:
        options, seconds = renewal.fetch()
    except Exception as error:  # Airflow's, or of what its connection asks: the keys may still be good
        said = str(error) if isinstance(error, HeadwaterError) else type(error).__name__
        log.warning("%s: its keys could not be fetched again, and those of before are used: %s", root, said)
        return
    if _renewals.get(root) is renewal:
        _known[root], renewal.due = options, time.monotonic() + seconds


def of(place: str) -> StoreOptions:
    """Those of the lake that `place` lies in; of lakes that lie in each other, the innermost."""
    roots = [root for root in list(_known) if place == root or place.startswith(f"{root}/")]
    if not roots:
        return _ENVIRONMENT
    root = max(roots, key=len)
    _in_time(root)
    return _known[root]


def in_use() -> set[StoreOptions]:
    """Those that `of` may give from now on."""
    return {_ENVIRONMENT, *_known.copy().values()}
