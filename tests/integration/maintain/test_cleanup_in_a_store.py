"""What clean-up asks of a store: requests are money and time."""

from __future__ import annotations

from threading import Event

import pyarrow as pa

from fixtures.object_stores import S3Server
from fixtures.store_faults import MoodyStore
from headwater import store_options
from headwater.delta import log_files, small_tables
from headwater.maintain.cleanup import Cleaned, clean
from headwater.store_options import StoreOptions

ROWS = pa.schema([("a", pa.int64())])


def test_files_and_entries_go_many_by_a_request(s3_server: S3Server) -> None:
    with MoodyStore(s3_server.address) as store:
        folder = s3_server.uri(s3_server.bucket(), "table")
        through = s3_server.through(store.address)
        secrets = (("access_key_id", s3_server.access_key), ("secret_access_key", s3_server.secret_key))
        store_options.register(folder, StoreOptions(through.endpoint, s3_server.region, None, secrets))
        table = small_tables.create_table(folder, ROWS)
        for number in range(40):
            small_tables.replace_once(table, [{"a": number}], ROWS)
        newest = small_tables.write_checkpoint(folder)
        assert store.requests["DELETE"] == 0
        before = store.requests
        found = log_files.look(folder)
        cleaned = clean(folder, found, newest, log_from=newest, orphans_before=None, stop=Event())
        asked = {kind: count - before[kind] for kind, count in store.requests.items()}
        assert (cleaned.files, cleaned.orphans, cleaned.log_files) == (39, 0, newest)
        assert (asked["DELETE"], asked["HEAD"]) == (2, 0), asked
        again = clean(folder, log_files.look(folder), newest, log_from=newest, orphans_before=None, stop=Event())
        assert again == Cleaned()
        table = small_tables.open_version(folder)
        assert table.to_pyarrow_table()["a"].to_pylist() == [39]
