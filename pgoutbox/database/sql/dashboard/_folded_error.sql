-- The error that names a group. Errors that differ only in numbers and addresses become equal: digits are replaced,
-- except in status codes such as 404 or 550.
regexp_replace(
    left(regexp_replace(left(coalesce(m.last_error, ''), 400), '[^\s<>(),:;]+@[^\s<>(),:;]+', '(address)', 'g'), 200),
    '(?<!\d)(?![45]\d\d(?!\d))\d+', '#', 'g'
)
