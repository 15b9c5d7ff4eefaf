-- Session locks from SQL: the numbers that syncguard's AdvisoryKey makes of text, and two helpers.
-- Optional: the Rust library does not use them. May be applied again and again. Undone by down.sql.
--
-- Needs nothing but PostgreSQL 11 or later: sha256() is built in, pgcrypto is not used.
-- The functions are created in the first schema of the search_path, and find each other there.
--
-- lower() folds the letters that the database's locale knows; see docs/advisory-locks.md for the
-- texts for which that is not what AdvisoryKey::from_text does, and for what to do about it.

CREATE OR REPLACE FUNCTION email_to_lock_id(p_email text)
RETURNS bigint
LANGUAGE sql STABLE STRICT PARALLEL SAFE
AS $$
  -- STABLE, not IMMUTABLE: convert_to() is, and the locale may change with the operating system.
  SELECT ('x' || pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to(
    pg_catalog.lower(pg_catalog.btrim(p_email, ' ')), 'UTF8')), 1, 8), 'hex'))::pg_catalog.bit(64)::pg_catalog.int8
$$;

CREATE OR REPLACE FUNCTION generate_lock_id(p_namespace text, p_key text)
RETURNS bigint
LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE
AS $$
BEGIN
  -- ('a', 'b:c') and ('a:b', 'c') would be one number.
  IF pg_catalog.strpos(p_namespace, ':') > 0 THEN
    RAISE EXCEPTION 'the namespace of a session lock contains a colon' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  RETURN ('x' || pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to(
    p_namespace || ':' || pg_catalog.lower(pg_catalog.btrim(p_key, ' ')), 'UTF8')), 1, 8), 'hex'))::pg_catalog.bit(64)::pg_catalog.int8;
END
$$;

-- Both of the following are for a session that is the caller's own from the one call to the other:
-- never through a pooler, never by two requests that may run on two connections.

CREATE OR REPLACE FUNCTION acquire_cleanup_lock(p_email text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE STRICT
SET search_path FROM CURRENT
AS $$
DECLARE
  v_lock_id bigint := email_to_lock_id(p_email);
  v_acquired boolean := pg_catalog.pg_try_advisory_lock(v_lock_id);
BEGIN
  IF v_acquired THEN
    RAISE NOTICE 'Acquired cleanup lock for email hash: %', v_lock_id;
  ELSE
    RAISE NOTICE 'Failed to acquire cleanup lock (already held): %', v_lock_id;
  END IF;
  RETURN v_acquired;
END
$$;

CREATE OR REPLACE FUNCTION release_cleanup_lock(p_email text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE STRICT
SET search_path FROM CURRENT
AS $$
DECLARE
  v_lock_id bigint := email_to_lock_id(p_email);
  v_released boolean := pg_catalog.pg_advisory_unlock(v_lock_id);
BEGIN
  IF v_released THEN
    RAISE NOTICE 'Released cleanup lock for email hash: %', v_lock_id;
  ELSE
    RAISE WARNING 'Failed to release cleanup lock (not held by this session): %', v_lock_id;
  END IF;
  RETURN v_released;
END
$$;
