select
    c.region,
    count(distinct o.id) as orders,
    sum(l.quantity) as items,
    sum(l.quantity * l.price) as revenue
from {{ source('public', 'order_lines') }} l
join {{ source('public', 'orders') }} o on o.id = l.order_id
join {{ source('public', 'customers') }} c on c.id = o.customer_id
group by c.region
