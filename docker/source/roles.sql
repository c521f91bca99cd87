-- Run once, by the administrator, in the new database `shop`: the tables' owner, and the role that Headwater connects as.
\set ON_ERROR_STOP on
\getenv password HEADWATER_ROLE_PASSWORD
create role shop nologin;
create role headwater login replication password :'password';
grant create on database shop to shop;
grant usage, create on schema public to shop;
-- Its own publications need the tables' owner; everything else needs SELECT and REPLICATION only.
grant shop to headwater;
set role shop;
\ir example/shop.sql
