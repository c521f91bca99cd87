-- The shop of `make demo` and of docker/compose.yaml.
create table customers (
  id bigint generated always as identity primary key, name text not null, region text not null,
  since timestamptz not null default now()
);
create table products (
  id integer primary key, name text not null, price numeric(10,2) not null, stock integer not null
);
create table orders (
  id bigint generated always as identity primary key, customer_id bigint not null references customers,
  status text not null default 'new', placed_at timestamptz not null default clock_timestamp()
);
create table order_lines (
  order_id bigint references orders, line smallint, product_id integer not null references products,
  quantity integer not null, price numeric(10,2) not null, primary key (order_id, line)
);
create index on orders (customer_id);

insert into customers (name, region)
  select 'Customer ' || i, (array['north', 'south', 'east', 'west'])[1 + i % 4] from generate_series(1, 1000) i;
insert into products select i, 'Product ' || i, (i * 37 % 9000 + 100) / 100.0, 1000 from generate_series(1, 200) i;
insert into orders (customer_id, status) select 1 + i * 7 % 1000, 'shipped' from generate_series(1, 3000) i;
insert into order_lines
  select o.id, l, 1 + (o.id * 3 + l * 11) % 200, 1 + (o.id + l) % 5, p.price
  from orders o, generate_series(1, 3) l join products p on true
  where p.id = 1 + (o.id * 3 + l * 11) % 200;
