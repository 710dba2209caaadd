-- soft input errors of idem_digest, for servers that have them (16 and later)
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
SELECT current_setting('server_version_num')::int >= 160000 AS has_soft_errors \gset
\if :has_soft_errors
SELECT pg_input_is_valid(repeat('0', 64), 'idem_digest'), pg_input_is_valid('abc', 'idem_digest');
SELECT message, detail, sql_error_code FROM pg_input_error_info('abc', 'idem_digest');
\endif
