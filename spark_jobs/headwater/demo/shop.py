"""The demo's source: a small shop, and a writer whose transactions go across its tables.

The writer is the only one who changes the shop. As the last statement of every transaction it asks the question
that the downstream job will ask of the lake, so for each transaction (by its id) the true answer after its
commit is known: `headwater.demo.oracle` finds the transaction that belongs to a position.
"""

from __future__ import annotations

import random
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any, LiteralString

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]
Revenue = dict[str, tuple[int, int, Decimal]]
"""Per region: orders, items, revenue."""

CREATE = Path(__file__).with_name("shop.sql").read_text(encoding="utf-8")
"""Makes its tables, and fills them."""

REVENUE = """
select c.region, count(distinct o.id), sum(l.quantity), sum(l.quantity * l.price)
from order_lines l join orders o on o.id = l.order_id join customers c on c.id = o.customer_id
group by c.region
"""

TABLES = ("customers", "products", "orders", "order_lines")


def revenue(connection: Connection) -> Revenue:
    """The question, asked at the source."""
    return {
        region: (int(orders), int(items), Decimal(total))
        for region, orders, items, total in connection.execute(REVENUE).fetchall()
    }


class Writer:
    """Transactions from a thread of its own, about `rate` a second, until `stop`. Reproducible: seeded."""

    def __init__(self, connection: Connection, rate: float, seed: int = 1) -> None:
        self.answers: dict[int, Revenue] = {}
        self.error: Exception | None = None
        self._connection = connection
        self._pause = 1 / rate
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shop-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last transaction has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        acts = (self._order, self._order, self._ship, self._cancel, self._move, self._correct, self._regret)
        try:
            while not self._stop.wait(self._pause * self._random.uniform(0.5, 1.5)):
                with self._connection.transaction(force_rollback=(act := self._random.choice(acts)) == self._regret):
                    act()
                    xid = self._number("select pg_current_xact_id()::text::bigint")
                    self.answers[xid] = revenue(self._connection)
        except Exception as error:  # shown by the demo: a thread has nobody to raise to
            self.error = error

    def _number(self, query: LiteralString, *values: Any) -> int:
        row = self._connection.execute(query, values).fetchone()
        assert row is not None
        return int(row[0])

    def _some_order(self) -> int:
        return self._number("select id from orders offset %s limit 1", self._random.randrange(3000))

    def _order(self) -> None:
        order = self._number("insert into orders (customer_id) values (%s) returning id", self._random.randint(1, 1000))
        for line, product in enumerate(self._random.sample(range(1, 201), self._random.randint(1, 4)), 1):
            quantity = self._random.randint(1, 5)
            self._connection.execute(
                "insert into order_lines select %s, %s, id, %s, price from products where id = %s",
                (order, line, quantity, product),
            )
            self._connection.execute("update products set stock = stock - %s where id = %s", (quantity, product))

    def _ship(self) -> None:
        self._connection.execute("update orders set status = 'shipped' where id = %s", (self._some_order(),))

    def _cancel(self) -> None:
        order = self._some_order()
        self._connection.execute("delete from order_lines where order_id = %s", (order,))
        self._connection.execute("update orders set status = 'cancelled' where id = %s", (order,))

    def _move(self) -> None:
        region = self._random.choice(("north", "south", "east", "west"))
        self._connection.execute(
            "update customers set region = %s where id = %s", (region, self._random.randint(1, 1000))
        )

    def _correct(self) -> None:
        self._connection.execute(
            "update order_lines set quantity = quantity + 1 where order_id = %s", (self._some_order(),)
        )

    def _regret(self) -> None:
        """A transaction that is rolled back: none of it may ever show."""
        self._order()
