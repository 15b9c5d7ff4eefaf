//! The SQL that tells waiters in other processes of a release. Why it is as it is: see
//! [`wake_ups`](crate::leases::wake_ups).

/// The channel of the notifications.
pub(super) const CHANNEL: &str = "syncguard_wake";

/// The class of the advisory locks, "sgwk".
pub(super) const CLASS: i32 = 0x7367_776B;

/// The SQL that notifies the waiters of the key in this column, if there are any. It is part of every
/// release, where each function costs a lookup although it is hardly ever needed: so the number is
/// sent in hexadecimal, by one function instead of two.
pub(crate) fn notify_waiters(key: &str) -> String {
    let number = format!("pg_catalog.hashtext({key})");
    format!(
        "CASE WHEN NOT pg_catalog.pg_try_advisory_xact_lock({CLASS}, {number}) \
         THEN pg_catalog.pg_notify('{CHANNEL}', pg_catalog.to_hex({number})) END"
    )
}

/// Whether the current role may notify waiters here, for a survey: NULL where the functions are missing.
pub(crate) const MAY_NOTIFY: &str = "pg_catalog.has_function_privilege(pg_catalog.to_regprocedure(\
        'pg_catalog.pg_try_advisory_xact_lock(pg_catalog.int4,pg_catalog.int4)')::pg_catalog.oid, 'EXECUTE') \
     AND pg_catalog.has_function_privilege(pg_catalog.to_regprocedure(\
        'pg_catalog.pg_notify(pg_catalog.text,pg_catalog.text)')::pg_catalog.oid, 'EXECUTE')";
