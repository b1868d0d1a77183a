-- A shared content of a fan-out that contents.sql has left out, as a JSON text.
SELECT c.body::text FROM pgoutbox.content AS c WHERE c.id = %(id)s::bigint
