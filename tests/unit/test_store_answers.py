"""What is shown of a store's answer: its own code and sentence, and nothing of the request that it quotes."""

from __future__ import annotations

import pytest

from headwater.store_answers import said, status_of
from headwater.terminal.scrub import Scrubber

ANSWERED = "Server returned non-2xx status code"
AWS = (
    "Generic S3 error: Error performing PUT https://lake.example/shop/day=2026-01-01/a.parquet in 3.85s, after 14 "
    f"retries, max_retries: 100, retry_timeout: 3s  - {ANSWERED}: 400 Bad Request: <?xml version='1.0'?>\n"
    "<Error><Code>ExpiredToken</Code><Message>The token&apos;s time is over.</Message><Token-0>FwoG</Token-0></Error>"
)
GOOGLE = (
    f"Generic GCS error: Error performing PUT https://gcs.example/a in 1ms - {ANSWERED}: 403 Forbidden: "
    '{\n"error": {"code": 403, "message": "lake@x may not create objects.", "status": "FORBIDDEN"}}'
)
ENTRA = (
    f"Generic MicrosoftAzure error: Error performing POST REDACTED in 1ms - {ANSWERED}: 401 Unauthorized: "
    '{"error":"invalid_client","error_description":"AADSTS7000215: Invalid client secret."}'
)
MISSING = (
    f"Object at location a not found: Error performing GET http://h:1/a in 507.9µs - {ANSWERED}: 404 Not Found: 404"
)
AWAY = (
    "Generic S3 error: Error performing list request: Error performing GET http://h:1/b?prefix=a in 1s - HTTP error: no"
)


@pytest.mark.parametrize(
    ("text", "shown", "status"),
    [
        (AWS, "PUT at https://lake.example, 15 times: 400 Bad Request, ExpiredToken: The token's time is over", 400),
        (GOOGLE, "PUT at https://gcs.example: 403 Forbidden, FORBIDDEN: lake@x may not create objects", 403),
        (ENTRA, "POST: 401 Unauthorized, invalid_client: AADSTS7000215: Invalid client secret", 401),
        (MISSING, "GET at http://h:1: 404 Not Found", 404),
        (AWAY, "GET at http://h:1: HTTP error: no", None),
        ("Generic S3 error: no ETag in <Token-0>FwoG</Token-0>", "Generic S3 error: no ETag in", None),
    ],
)
def test_an_answer_is_told_by_its_status_code_and_sentence(text: str, shown: str, status: int | None) -> None:
    assert (said(text), status_of(text)) == (shown, status)
    assert said(text.replace("\n", "")) == shown, "some stores write it in one line"


def test_what_another_library_prints_of_an_answer_has_no_token() -> None:
    assert "FwoG" not in Scrubber().scrub(AWS)
