-- Undoes up.sql. May be applied again and again. No data is lost: there is none.
-- Locks that are held stay held until they are released or their sessions end.

DROP FUNCTION IF EXISTS acquire_cleanup_lock(text);
DROP FUNCTION IF EXISTS release_cleanup_lock(text);
DROP FUNCTION IF EXISTS generate_lock_id(text, text);
DROP FUNCTION IF EXISTS email_to_lock_id(text);
