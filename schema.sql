-- The two tables of syncguard, and an optional third. This file is the only DDL: `setup_schema()` runs it
-- for the configured names, a migration may run it as it is. It can be run any number of times.
--
-- Row for row what every SyncGuard client for PostgreSQL uses. COLLATE "C" keeps the indexes in order
-- whatever becomes of the database's collation: in one that a system upgrade has changed, keys that are
-- held are not found any more, and counters begin anew.

-- One row per held key. A row whose lease is over stays until it is taken over or cleaned up.
CREATE TABLE IF NOT EXISTS "syncguard_locks" (
    "key" TEXT COLLATE "C" PRIMARY KEY,  -- the stored key: the caller's in NFC, or its hash
    "lock_id" TEXT COLLATE "C" NOT NULL, -- 22 characters; whoever knows it can release the lock
    "expires_at_ms" BIGINT NOT NULL,     -- Unix milliseconds of this server's clock
    "acquired_at_ms" BIGINT NOT NULL,
    "fence" TEXT COLLATE "C" NOT NULL,   -- 15 digits
    "user_key" TEXT COLLATE "C" NOT NULL -- the caller's key in NFC
);

-- Release and extend know the lock id only.
CREATE UNIQUE INDEX IF NOT EXISTS "idx_syncguard_locks_lock_id" ON "syncguard_locks" ("lock_id");

-- Cleanup and monitoring.
CREATE INDEX IF NOT EXISTS "idx_syncguard_locks_expires" ON "syncguard_locks" ("expires_at_ms");

-- One counter per key that was ever locked. NEVER delete, truncate or lower one: a fence that is
-- handed out twice lets a holder that woke up late overwrite the newer holder's work.
CREATE TABLE IF NOT EXISTS "syncguard_fence_counters" (
    "fence_key" TEXT COLLATE "C" PRIMARY KEY,
    "fence" BIGINT NOT NULL DEFAULT 0,
    "key_debug" TEXT COLLATE "C"         -- the caller's key in NFC, for people; nothing reads it
);

-- Optional: the members of keys, beside the table of the leases. Only shared leases, fair waiting, and holders
-- that say who they are or what for (owner, note), need it. With auto_create_tables the first of them makes it, otherwise
-- run this part, or build one client with create_members_table(true).
CREATE TABLE IF NOT EXISTS "syncguard_members" (
    "lock_id" TEXT COLLATE "C" PRIMARY KEY,  -- of the member's own lease, or of whoever waits
    "key" TEXT COLLATE "C" NOT NULL,         -- the stored key
    "role" TEXT COLLATE "C" NOT NULL,        -- s: shares the key, w: waits for it, n: a note about its holder
    "since_ms" BIGINT NOT NULL,              -- Unix milliseconds of this server's clock
    "expires_at_ms" BIGINT NOT NULL,
    "fence" TEXT COLLATE "C",                -- that of its group, or of its lease
    "priority" INTEGER NOT NULL DEFAULT 0,
    "owner" TEXT COLLATE "C",
    "note" TEXT COLLATE "C"
);

-- The members of a key.
CREATE INDEX IF NOT EXISTS "idx_syncguard_members_key" ON "syncguard_members" ("key", "since_ms");

-- Who waits for a key, however many members it has.
CREATE INDEX IF NOT EXISTS "idx_syncguard_members_waiting" ON "syncguard_members" ("key", "since_ms") WHERE "role" = 'w';
