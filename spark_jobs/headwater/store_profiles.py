"""Stores that a profile of Amazon's configuration files tells the way into (`lake.storage.profile`).

The libraries that reach stores read no such files. botocore does, with all that a profile may say: keys, a role to
assume, a program that gives keys, single sign-on. Keys that expire are asked for again while a driver runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from headwater import store_options
from headwater.errors import Refused, Transient
from headwater.store_options import StoreOptions, refuse_foreign_secrets, seconds_good

_OF_THE_MACHINE: Final = ("iam-role", "container-role")
"""Where botocore looks when a profile names nothing: another identity than the one that the file asks for."""


def enter(root: str, profile: str, given: StoreOptions, where: str) -> None:
    """Let this process reach the lake at `root` by the profile, and before that by what the pipeline file says itself
    (`given`). Refused when there is no such profile, or nothing that reads it; Transient when it gives no keys."""
    store_options.register_renewed(root, ("profile", profile, given), partial(_read, profile, given, where))


def _read(profile: str, given: StoreOptions, where: str) -> tuple[StoreOptions, float]:
    """The options, and for how many seconds they are good."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError, InvalidConfigError, ProfileNotFound
        from botocore.session import Session
    except ModuleNotFoundError:
        raise Refused(
            "profiles are read by botocore, which is not installed here",
            code="no_provider",
            where=where,
            remedy="install botocore (the extra headwater[aws]) wherever this pipeline's commands run",
        ) from None
    try:
        session = Session(profile=profile)
        said = session.get_scoped_config()
        region, endpoint = session.get_config_variable("region"), said.get("endpoint_url")
        with _unheard():
            found = session.get_credentials()
            keys = found.get_frozen_credentials() if found is not None else None
    except ProfileNotFound:
        raise Refused(
            f"there is no profile {profile} in the configuration files of this machine and user",
            code="bad_configuration",
            where=where,
            remedy="add it to ~/.aws/config (or the file that AWS_CONFIG_FILE names), or name another one",
        ) from None
    except InvalidConfigError:
        raise Refused(
            f"the profile {profile} does not hold together",
            code="bad_configuration",
            where=where,
            remedy=f"aws sts get-caller-identity --profile {profile} shows why",
        ) from None
    except (BotoCoreError, ClientError, OSError, ValueError, RuntimeError) as error:
        # Of a role, a program, a sign-on. Its text may hold what a program has answered.
        raise Transient(
            f"the profile {profile} gave no keys ({type(error).__name__})",
            code="lake_unavailable",
            where=where,
            remedy=f"aws sts get-caller-identity --profile {profile} shows why",
        ) from None
    if keys is None or (found.method in _OF_THE_MACHINE and "credential_source" not in said):
        raise Refused(
            f"the profile {profile} names no keys, and nothing that gives some",
            code="bad_configuration",
            where=where,
            remedy="give it keys, a role or a credential_process, or take lake.storage.profile out of the file",
        )
    secrets = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key}
    secrets |= {"session_token": keys.token} if keys.token else {}
    refuse_foreign_secrets(secrets, f"the profile {profile}", where)
    expiry = getattr(found, "_expiry_time", None)  # botocore has no other word for it
    options = replace(
        given,
        endpoint=given.endpoint or str(endpoint or ""),
        region=given.region or str(region or ""),
        secrets=tuple(sorted(secrets.items())),
    )
    return options, seconds_good(expiry.timestamp() if expiry is not None else None)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """botocore logs what a program has answered that failed to give keys."""
    logger = logging.getLogger("botocore.credentials")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
